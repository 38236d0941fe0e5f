//! A small virtual machine with its own kernel, which mounts the file systems of a guest: the appliance.
//!
//! ```text
//! this process                        QEMU, without rights              in the machine
//! kernel, initrd (memory)  ─────────►  -kernel -initrd  ─────────────►  this program as process 1
//! NBD servers of disks     ◄───────►   virtio-blk       ◄────────────►  the kernel's drivers
//! messages of guest-files  ◄───────►   virtio-serial    ◄────────────►  guest: assemble, mount, read
//! ```
//! The kernel is one of this host, and the initrd has this program with the libraries that it needs. Everything that
//! QEMU gets is an open file: kernel, initrd and sockets. So nothing has a name that could remain.

mod elf;
mod error;
mod guest;
mod initrd;
mod kernel;
mod launch;
mod process;

pub use error::ApplianceError;
pub use guest::serve_as_init;
pub use initrd::{ApplianceProgram, build_initrd};
pub use kernel::{ApplianceKernel, find_kernel};
pub use launch::become_machine;
pub use process::{ApplianceDisk, ApplianceMachine, ApplianceMachineOptions};

/// The first argument of this program as process 1 of an appliance.
pub const APPLIANCE_INIT: &str = "files-appliance";
/// The name of the channel between the appliance and its parent.
const CHANNEL_NAME: &str = "holdfast";
