#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    holdfast_serve::hostile::vhost_user_request(bytes);
});
