//! Tests with a real QEMU that runs no guest: QEMU's own `qemu-io` does the writes of a guest through its devices.

#![expect(clippy::unwrap_used, reason = "the helpers of tests unwrap like the tests")]
#![expect(clippy::disallowed_methods, reason = "the tests run QEMU")]

mod bare;
mod cut;
mod faults;
mod iothreads;
mod memory;
mod model;
mod monitor;
mod switches;
mod tracking;
