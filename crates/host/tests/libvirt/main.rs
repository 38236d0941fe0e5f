//! Against a real libvirt of the tests' own, with machines that never boot: what a guest would write, QEMU's `qemu-io` does.

#![cfg(feature = "libvirt")]
#![expect(clippy::unwrap_used, reason = "the helpers of tests unwrap like the tests")]
#![expect(clippy::disallowed_methods, reason = "the tests run libvirt and QEMU")]

mod changes;
mod frozen;
mod machines;
