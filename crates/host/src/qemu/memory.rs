//! Saves and restores the memory of a running machine, by QEMU's migration.
//!
//! QEMU sends memory as a stream: pages in the order in which QEMU finds them, some several times, and the state of
//! the devices at the end. Streams of two points in time share few chunks. So the stream is parsed while it arrives
//! ([`disassemble`]): pages are written to their offsets in a device, which is deduplicated like a disk, and the rest
//! is a small [`MemoryState`]. [`assemble`] creates a stream from both for QEMU's `-incoming`.
//!
//! Source: QEMU's `migration/savevm.c`, `migration/ram.c`, `docs/devel/migration.rst`, as of 7.2. The parts that are
//! used here are unchanged since 2.5, except for those of capabilities, which are switched off.

mod assemble;
mod destination;
#[cfg(feature = "hostile")]
pub(crate) mod hostile;
mod migrate;
mod parse;
mod receive;
mod settings;
mod state;

pub use assemble::{AssembleError, assemble};
pub use destination::cancel_held_migration;
pub(crate) use destination::{HELD, forget_destination, is_held, note_destination, noted_destination};
pub(crate) use migrate::{CANCELLING, MemorySender, Sent, wake_cancelled};
pub use migrate::{MemoryMethod, MemoryMode, end_sending};
pub use parse::{MakeStore, Memory, MemoryStreamError, disassemble};
pub use receive::{MemoryPipe, MemoryReceiver, receive};
pub(crate) use settings::MigrationSettings;
pub use state::{MemoryState, RamBlock, StateError};

use crate::qemu::qmp::{Monitor, MonitorError, QmpCommand};

/// The first bytes of a stream: "QEVM".
const STREAM_MAGIC: u32 = 0x5145_564d;
const STREAM_VERSION: u32 = 3;

/// The first byte of a section of the stream.
mod section {
    pub(super) const START: u8 = 0x01;
    pub(super) const PART: u8 = 0x02;
    pub(super) const END: u8 = 0x03;
    pub(super) const SUBSECTION: u8 = 0x05;
    pub(super) const CONFIGURATION: u8 = 0x07;
    pub(super) const COMMAND: u8 = 0x08;
    pub(super) const FOOTER: u8 = 0x7e;
}

/// Flags of a memory record, in the low bits of its address.
mod record {
    /// A page filled with one byte, which follows; zero in all versions since 2.11.
    pub(super) const FILL: u64 = 0x02;
    /// The sizes of the blocks.
    pub(super) const SIZES: u64 = 0x04;
    /// A page, which follows.
    pub(super) const PAGE: u64 = 0x08;
    /// The end of the section.
    pub(super) const END: u64 = 0x10;
    /// The block is the same as in the previous record.
    pub(super) const SAME_BLOCK: u64 = 0x20;
}

/// Size of a page of this machine's memory in bytes.
///
/// # Errors
/// The processor is of a type for which QEMU's page size is not known here.
pub fn page_bytes(monitor: &dyn Monitor) -> crate::qemu::qmp::Result<u64> {
    const KNOWN: [&str; 6] = ["x86_64", "i386", "aarch64", "arm", "riscv64", "s390x"];
    let target = monitor.execute(&QmpCommand::new("query-target", serde_json::Value::Null))?;
    let processor = target["arch"].as_str().unwrap_or_default();
    if KNOWN.contains(&processor) {
        return Ok(4096);
    }
    Err(MonitorError::Invalid {
        command: "query-target".to_owned(),
        detail: format!("the page size of processors of type {processor:?} is unknown"),
    })
}

const RAM: &str = "ram";
