//! A model of QEMU's monitor, for tests: it answers the commands by which Holdfast backs up a running machine.
//!
//! **This is not QEMU.** It has block nodes with their permissions, dirty bitmaps, devices, exports, backup jobs and handed-over files, and
//! refuses what QEMU refuses, so that a fault can be put at each command of a backup within seconds. Sources: QEMU's
//! `qapi/block-core.json`, `block.c`, `blockdev.c`, `nbd/server.c` and `monitor/`, of 7.2. That it answers as QEMU does is tested with a
//! real one (`crates/host/tests/qemu/model.rs`).
//!
//! Everything above the socket is the client's real code; exported nodes are served by our own NBD server.
//!
//! It differs from QEMU, on purpose:
//!
//! - no guest runs: [`QemuModel::guest_write`] is the guest;
//! - a job has done its work when it is looked at for the second time, so that nothing waits for a clock;
//! - an image of qcow2 is not read: what the guest sees of it is kept in memory, and a persistent bitmap is not stored in it;
//! - requests are never on their way, and a full scratch file is not modelled;
//! - migration (memory), the guest's agent, images with layers, and QMP events are not modelled.

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
