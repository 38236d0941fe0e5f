#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    holdfast_host::hostile::zfs_stream(bytes);
});
