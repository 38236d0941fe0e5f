#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    holdfast_transfer::hostile::transfer_compressed(bytes);
});
