//! The parts of a machine's memory stream besides pages: the blocks that the pages belong to, and the state of the
//! devices.
//!
//! `docs/format/memory-state.md` describes the format.

use std::collections::BTreeSet;

const MAGIC: &[u8; 8] = b"HFMEMORY";
const VERSION: u32 = 1;
/// Limit on the blocks of a machine: main memory, firmware, video memory, and some per device.
pub(super) const BLOCK_COUNT_MAX: u32 = 4096;
/// Limit on the memory: more than QEMU's largest machines have.
const MEMORY_BYTES_MAX: u64 = 64 << 40;
/// Limits on the page size of QEMU: 4 KiB on most processors, 64 KiB on some.
const PAGE_BYTES_RANGE: std::ops::RangeInclusive<u64> = 1024..=1 << 20;

/// A block of a machine's memory: "pc.ram", "vga.vram", "/rom@etc/acpi/tables".
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RamBlock {
    /// The name in QEMU.
    pub name: String,
    /// The size in bytes.
    pub size_bytes: u64,
}

/// A memory stream without the pages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryState {
    /// Size of a page in bytes.
    pub page_bytes: u64,
    /// The blocks in order; in the device they are stored one after the other.
    pub blocks: Vec<RamBlock>,
    /// The id of the memory's section in the stream.
    pub(super) section_id: u32,
    /// Whether sections end with a footer.
    pub(super) has_footers: bool,
    /// Whether the memory has an end section.
    pub(super) has_end: bool,
    /// The stream before the first page.
    pub(super) head: Vec<u8>,
    /// The stream after the last page: the devices.
    pub(super) tail: Vec<u8>,
}

/// Why the bytes of a state cannot be parsed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StateError {
    /// The data has another format.
    #[error("it is not a memory state")]
    Foreign,
    /// The data was written by a later version of this program.
    #[error("it has version {found}, but this program reads version {VERSION}")]
    Version {
        /// The version found.
        found: u32,
    },
    /// A value is invalid.
    #[error("its {field} is invalid")]
    Field {
        /// The field.
        field: &'static str,
    },
    /// The data ends early.
    #[error("it is truncated")]
    Short,
    /// There is extra data after the state.
    #[error("it is followed by more data")]
    Long,
}

impl MemoryState {
    /// Size of the device with the pages, in bytes.
    pub fn size_bytes(&self) -> u64 {
        self.blocks.iter().map(|block| block.size_bytes).sum()
    }

    /// Encodes the state in the format of `docs/format/memory-state.md`.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        let number = |bytes: &mut Vec<u8>, number: u32| bytes.extend(number.to_le_bytes());
        number(&mut bytes, VERSION);
        number(
            &mut bytes,
            u32::try_from(self.page_bytes).expect("checked when it was made"),
        );
        number(&mut bytes, self.section_id);
        bytes.extend([u8::from(self.has_footers), u8::from(self.has_end), 0, 0]);
        number(
            &mut bytes,
            u32::try_from(self.blocks.len()).expect("checked when it was made"),
        );
        for block in &self.blocks {
            bytes.push(u8::try_from(block.name.len()).expect("the stream has one byte for it"));
            bytes.extend(block.name.as_bytes());
            bytes.extend(block.size_bytes.to_le_bytes());
        }
        for part in [&self.head, &self.tail] {
            bytes.extend((part.len() as u64).to_le_bytes());
            bytes.extend(part);
        }
        bytes
    }

    /// Decodes a state that [`encode`](Self::encode) has written.
    pub fn decode(bytes: &[u8]) -> Result<Self, StateError> {
        let mut rest = ByteReader(bytes);
        if rest.take(MAGIC.len())? != MAGIC {
            return Err(StateError::Foreign);
        }
        match rest.u32()? {
            VERSION => {}
            found => return Err(StateError::Version { found }),
        }
        let page_bytes = u64::from(rest.u32()?);
        if !is_page_size(page_bytes) {
            return Err(StateError::Field { field: "page size" });
        }
        let section_id = rest.u32()?;
        let flags = rest.take(4)?;
        if flags[..2].iter().any(|flag| *flag > 1) || flags[2..] != [0, 0] {
            return Err(StateError::Field { field: "flags" });
        }
        let (has_footers, has_end) = (flags[0] == 1, flags[1] == 1);
        let count = rest.u32()?;
        if count > BLOCK_COUNT_MAX {
            return Err(StateError::Field {
                field: "number of blocks",
            });
        }
        let mut blocks = Vec::new();
        for _ in 0..count {
            let length = usize::from(rest.take(1)?[0]);
            let name = std::str::from_utf8(rest.take(length)?);
            blocks.push(RamBlock {
                name: name
                    .map_err(|_| StateError::Field {
                        field: "name of a block",
                    })?
                    .to_owned(),
                size_bytes: rest.u64()?,
            });
        }
        if !are_possible(&blocks, page_bytes) {
            return Err(StateError::Field {
                field: "name or size of a block",
            });
        }
        let (head, tail) = (rest.part()?, rest.part()?);
        if !rest.0.is_empty() {
            return Err(StateError::Long);
        }
        Ok(Self {
            page_bytes,
            blocks,
            section_id,
            has_footers,
            has_end,
            head,
            tail,
        })
    }
}

/// Whether the blocks have unique names and consist of whole pages, and their sizes can be added.
pub(super) fn are_possible(blocks: &[RamBlock], page_bytes: u64) -> bool {
    let sum = blocks.iter().try_fold(0_u64, |sum, block| {
        block
            .size_bytes
            .is_multiple_of(page_bytes)
            .then(|| sum.checked_add(block.size_bytes))?
    });
    let names: BTreeSet<&str> = blocks.iter().map(|block| &block.name[..]).collect();
    sum.is_some_and(|sum| sum <= MEMORY_BYTES_MAX)
        && names.len() == blocks.len()
        && blocks.len() <= BLOCK_COUNT_MAX as usize
}

/// Whether a page size is possible in QEMU.
pub(super) fn is_page_size(page_bytes: u64) -> bool {
    PAGE_BYTES_RANGE.contains(&page_bytes) && page_bytes.is_power_of_two()
}

struct ByteReader<'a>(&'a [u8]);

impl<'a> ByteReader<'a> {
    fn take(&mut self, length: usize) -> Result<&'a [u8], StateError> {
        let (taken, rest) = self.0.split_at_checked(length).ok_or(StateError::Short)?;
        self.0 = rest;
        Ok(taken)
    }

    fn u32(&mut self) -> Result<u32, StateError> {
        let bytes = self.take(4)?.try_into().expect("four bytes");
        Ok(u32::from_le_bytes(bytes))
    }

    fn u64(&mut self) -> Result<u64, StateError> {
        let bytes = self.take(8)?.try_into().expect("eight bytes");
        Ok(u64::from_le_bytes(bytes))
    }

    fn part(&mut self) -> Result<Vec<u8>, StateError> {
        let length = usize::try_from(self.u64()?).map_err(|_| StateError::Short)?;
        Ok(self.take(length)?.to_vec())
    }
}
