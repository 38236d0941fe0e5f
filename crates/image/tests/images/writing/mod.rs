//! Writes images, and reads them with QEMU.

mod bulk;
mod matrix;
mod options;
mod random_work;
mod refused;
mod space;
mod threads;
mod work;

const MIB: u64 = 1 << 20;
