//! Real hypervisors and file systems for tests: each is created for one test and removed when it is dropped.
//!
//! libvirtd, QEMU, zfs-fuse and the kernel's file systems are the real ones. A missing program fails the test with the
//! name of the package to install; a test that needs root is skipped with a reason.

#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test fails where its surroundings do, and they are programs of the system"
)]

pub mod file_systems;
pub mod json_schema;
pub mod libvirt;
pub mod qemu;

mod process;

pub use process::{ServiceSocket, activate, assert_served, copy_program, processor_demand, run, write_program};
