#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    holdfast_image::hostile::vhd_stream(bytes);
});
