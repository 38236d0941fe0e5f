#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    holdfast_hardware::hostile::virtualbox_registry(bytes);
});
