//! A model of QEMU's monitor for tests: it answers the commands that Holdfast uses to back up a running machine.
//!
//! **This is not QEMU.** The model has block nodes with permissions, dirty bitmaps, devices, exports, backup jobs and
//! passed files, and refuses the same requests as QEMU, so that a test can inject a fault at each command of a backup
//! within seconds. Sources: `qapi/block-core.json`, `block.c`, `blockdev.c`, `nbd/server.c` and `monitor/` of QEMU 7.2.
//! A test compares its answers with those of a real QEMU (`crates/host/tests/qemu/model.rs`).
//!
//! The client's code is the real one from the socket on; exported nodes are served by Holdfast's NBD server.
//!
//! Intended differences from QEMU:
//!
//! - no guest runs: [`QemuModel::guest_write`] replaces the guest;
//! - a job is complete when it is queried for the second time, so that no test waits for a clock;
//! - a qcow2 image is not read: the content that the guest sees is in memory, and persistent bitmaps are not stored in
//!   the image;
//! - there are no requests in flight, and a full scratch file is not modelled;
//! - migration (memory), the guest agent, images with backing files, and QMP events are not modelled.

mod commands;
mod content;
mod fault;
mod model;
mod node;
mod permissions;
mod refusal;
mod serving;
mod state;
mod wire;

pub use fault::{Fault, FaultKind};
pub use model::{ModelDisk, ModelFormat, ModelMachine, QemuModel};
