#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    holdfast_archive::hostile::tree_tar(bytes);
});
