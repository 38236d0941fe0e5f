//! Against a real QEMU, without a guest: what a guest would write is written through its devices by QEMU's own `qemu-io`.

#![expect(clippy::unwrap_used, reason = "the helpers of tests unwrap like the tests")]
#![expect(clippy::disallowed_methods, reason = "the tests run QEMU")]

mod bare;
mod cut;
mod faults;
mod iothreads;
mod memory;
mod monitor;
mod switches;
