//! Machines whose disks follow them: they run at the other host, and its hypervisor pulls the disks from here.
//!
//! ```text
//! image here ──► NBD server ──► a stream for each disk ──► socket there ──► QEMU there ──► overlay
//! ```
//!
//! 1. The other host makes an empty overlay for each disk. Its backing file is an export of the server here.
//! 2. The memory moves. When the machine is stopped, its hypervisor here gives the images up: the machine can run there, and reads
//!    through the overlays.
//! 3. The hypervisor there pulls everything. Then the images there are complete, and this host is not needed any more.
//!
//! If the connection is lost, or this process ends, the machine there is paused when it needs something that is missing, and sees
//! no error. The record of the move leads the next command to it.
//!
//! - `served_disk`: a disk that is served before and after its hypervisor gives it up
//! - `disk_server`: the server, and its streams
//! - `source`: the images of a machine
//! - `pull`: the time in which they are pulled; `resume`: after an interruption

mod disk_server;
mod pull;
mod resume;
mod served_disk;
mod source;

pub(crate) use pull::{PulledMachine, pull};
pub use resume::{ResumedPull, resume_pull};
pub(crate) use source::{ImageUse, PullSource};
