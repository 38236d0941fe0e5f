#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    if let Ok(text) = str::from_utf8(data) {
        let _ = text.parse::<holdfast_policy::Span>();
    }
});
