//! Creates a memory stream from its parts.

use std::io::Write;

use holdfast_block::{BlockDevice, Error as BlockError, to_usize};

use super::state::MemoryState;
use super::{record, section};

/// Bytes per read.
const PIECE_BYTES: u64 = 1 << 20;

/// Writes the stream of a memory: each page once, in the order of the addresses.
///
/// # Errors
/// Errors of `memory`, which must have the size in the state, and of `output`.
pub fn assemble(state: &MemoryState, memory: &dyn BlockDevice, output: &mut dyn Write) -> Result<(), AssembleError> {
    let size_bytes = state.size_bytes();
    if memory.size_bytes() != size_bytes {
        return Err(AssembleError::Size {
            memory_bytes: memory.size_bytes(),
            state_bytes: size_bytes,
        });
    }
    let mut writer = MigrationStreamWriter { state, output };
    writer.raw(&state.head)?;
    writer.section(section::PART, &[])?;
    let mut start = 0;
    for block in &state.blocks {
        let mut name = vec![u8::try_from(block.name.len()).expect("it came with a length of one byte")];
        name.extend(block.name.as_bytes());
        let mut piece = vec![0; to_usize(PIECE_BYTES.max(state.page_bytes))];
        let mut done = 0;
        while done < block.size_bytes {
            let length = (block.size_bytes - done).min(piece.len() as u64);
            let bytes = &mut piece[..to_usize(length)];
            memory.read_at(bytes, start + done).map_err(AssembleError::Memory)?;
            let records = writer.records(bytes, done, &name);
            writer.raw(&records)?;
            done += length;
        }
        start += block.size_bytes;
    }
    writer.end_of_section()?;
    if state.has_end {
        writer.section(section::END, &[])?;
        writer.end_of_section()?;
    }
    writer.raw(&state.tail)?;
    writer.output.flush().map_err(AssembleError::Output)
}

/// Why a memory stream cannot be created.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AssembleError {
    /// The size of the memory differs from that in the state.
    #[error("the memory has {memory_bytes} bytes, but its state is for {state_bytes} bytes")]
    Size {
        /// Size of the memory.
        memory_bytes: u64,
        /// Size in the state.
        state_bytes: u64,
    },
    /// The pages cannot be read.
    #[error("cannot read the memory")]
    Memory(#[source] BlockError),
    /// The stream cannot be written.
    #[error("cannot write the memory stream")]
    Output(#[source] std::io::Error),
}

struct MigrationStreamWriter<'a> {
    state: &'a MemoryState,
    output: &'a mut dyn Write,
}

impl MigrationStreamWriter<'_> {
    fn raw(&mut self, bytes: &[u8]) -> Result<(), AssembleError> {
        self.output.write_all(bytes).map_err(AssembleError::Output)
    }

    fn section(&mut self, kind: u8, bytes: &[u8]) -> Result<(), AssembleError> {
        self.raw(&[kind])?;
        self.raw(&self.state.section_id.to_be_bytes())?;
        self.raw(bytes)
    }

    fn end_of_section(&mut self) -> Result<(), AssembleError> {
        self.raw(&record::END.to_be_bytes())?;
        if self.state.has_footers {
            self.section(section::FOOTER, &[])?;
        }
        Ok(())
    }

    /// The records of consecutive pages, the first at `address` in its block. Zero pages are included: the receiver may
    /// have firmware there.
    fn records(&self, bytes: &[u8], address: u64, name: &[u8]) -> Vec<u8> {
        let mut records = Vec::with_capacity(bytes.len() + bytes.len() / 256);
        let mut address = address;
        for page in bytes.chunks(to_usize(self.state.page_bytes)) {
            let is_zero = page.iter().all(|byte| *byte == 0);
            let kind = if is_zero { record::FILL } else { record::PAGE };
            // Each piece names its block, so the pieces are independent of each other.
            let is_first = records.is_empty();
            let flags = kind | if is_first { 0 } else { record::SAME_BLOCK };
            records.extend((address | flags).to_be_bytes());
            if is_first {
                records.extend(name);
            }
            if is_zero {
                records.push(0);
            } else {
                records.extend(page);
            }
            address += page.len() as u64;
        }
        records
    }
}
