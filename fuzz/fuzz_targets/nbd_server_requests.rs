#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    holdfast_serve::hostile::nbd_server_requests(bytes);
});
