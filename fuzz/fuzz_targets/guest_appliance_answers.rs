#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    holdfast_guest_files::hostile::appliance_answers(bytes);
});
