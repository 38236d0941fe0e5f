#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    holdfast_serve::hostile::iscsi_login(bytes);
});
