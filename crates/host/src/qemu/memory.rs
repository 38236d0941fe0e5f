//! The memory of a running machine, as QEMU's migration gives it, and back.
//!
//! QEMU sends memory as a stream: pages in the order in which it finds them, some several times, and the state of the devices
//! at the end. Stored like this, two instants of a machine share little. So the stream is taken apart as it comes
//! ([`disassemble`]): pages go to their places in a device, which is deduplicated like a disk, and the rest is a small
//! [`MemoryState`]. [`assemble`] makes a stream of them that QEMU takes in with `-incoming`.
//!
//! Source: QEMU's `migration/savevm.c`, `migration/ram.c`, `docs/devel/migration.rst`, as of 7.2; the parts that are read here
//! are the same since 2.5, but for what is switched on by capabilities, which are switched off.

mod assemble;
#[cfg(feature = "hostile")]
pub(crate) mod hostile;
mod migrate;
mod parse;
mod receive;
mod state;

pub use assemble::{AssembleError, assemble};
pub use migrate::{MemoryMethod, MemoryMode, end_sending};
pub(crate) use migrate::{MemorySender, Sent};
pub use parse::{MakeStore, Memory, MemoryStreamError, disassemble};
pub use receive::{MemoryPipe, MemoryReceiver, receive};
pub use state::{MemoryState, RamBlock, StateError};

use crate::qemu::qmp::{Monitor, MonitorError, QmpCommand};

/// The first bytes of a stream: "QEVM".
const STREAM_MAGIC: u32 = 0x5145_564d;
const STREAM_VERSION: u32 = 3;

/// What a section of the stream begins with.
mod section {
    pub(super) const START: u8 = 0x01;
    pub(super) const PART: u8 = 0x02;
    pub(super) const END: u8 = 0x03;
    pub(super) const SUBSECTION: u8 = 0x05;
    pub(super) const CONFIGURATION: u8 = 0x07;
    pub(super) const COMMAND: u8 = 0x08;
    pub(super) const FOOTER: u8 = 0x7e;
}

/// What a record of memory is, in the low bits of its address.
mod record {
    /// A page of one byte, which follows; zero in all versions since 2.11.
    pub(super) const FILL: u64 = 0x02;
    /// The sizes of the blocks.
    pub(super) const SIZES: u64 = 0x04;
    /// A page, which follows.
    pub(super) const PAGE: u64 = 0x08;
    /// The end of the section.
    pub(super) const END: u64 = 0x10;
    /// The block is that of the record before.
    pub(super) const SAME_BLOCK: u64 = 0x20;
}

/// Size of a page of this machine's memory in bytes.
///
/// # Errors
/// A processor whose pages QEMU does not send by 4 KiB.
pub fn page_bytes(monitor: &dyn Monitor) -> crate::qemu::qmp::Result<u64> {
    const KNOWN: [&str; 6] = ["x86_64", "i386", "aarch64", "arm", "riscv64", "s390x"];
    let target = monitor.execute(&QmpCommand::new("query-target", serde_json::Value::Null))?;
    let processor = target["arch"].as_str().unwrap_or_default();
    if KNOWN.contains(&processor) {
        return Ok(4096);
    }
    Err(MonitorError::Senseless {
        command: "query-target".to_owned(),
        detail: format!("the memory of processors of type {processor:?} is not known here"),
    })
}

/// The name of the section with the memory.
const RAM: &str = "ram";
