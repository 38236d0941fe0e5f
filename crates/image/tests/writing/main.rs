//! Writes images, and reads them with QEMU.

#![expect(clippy::unwrap_used, reason = "the helpers of tests unwrap like the tests")]

mod bulk;
mod matrix;
mod options;
#[path = "../peer/mod.rs"]
mod peer;
mod random_work;
mod refused;
mod space;
mod threads;
mod work;

const MIB: u64 = 1 << 20;
