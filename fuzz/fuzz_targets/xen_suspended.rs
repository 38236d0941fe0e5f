#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    holdfast_hardware::hostile::xen_suspended(bytes);
});
