//! Tests with a real, private libvirt. Its machines never boot: QEMU's `qemu-io` does the writes of a guest.

#![cfg(feature = "libvirt")]
#![expect(clippy::unwrap_used, reason = "the helpers of tests unwrap like the tests")]
#![expect(clippy::disallowed_methods, reason = "the tests run libvirt and QEMU")]

mod changes;
mod frozen;
mod machines;
