//! Parses a memory stream while it arrives.

use std::io::{ErrorKind, Read};

use holdfast_block::{BlockDeviceMut, DirtyBitmap, to_usize};

use super::state::{BLOCK_COUNT_MAX, MemoryState, RamBlock, are_possible, is_page_size};
use super::{RAM, STREAM_MAGIC, STREAM_VERSION, record, section};

/// Limit on the length of a machine type.
const TYPE_BYTES_MAX: u32 = 1024;
/// Limit on the data before the first page, which usually has a few KiB.
const HEAD_BYTES_MAX: usize = 16 << 20;
/// Limit on the state of all devices.
const TAIL_BYTES_MAX: u64 = 512 << 20;
/// Limit on the consecutive pages that are written in one write.
const RUN_BYTES_MAX: usize = 1 << 20;

/// Why a memory stream cannot be parsed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MemoryStreamError {
    /// The stream cannot be read.
    #[error("cannot read the memory stream at byte {offset}")]
    Input {
        /// Number of bytes that were read.
        offset: u64,
        /// The reason.
        source: std::io::Error,
    },
    /// The stream ends early: the migration failed.
    #[error("the memory stream ends early, at byte {offset}")]
    Short {
        /// The length of the stream.
        offset: u64,
    },
    /// The stream does not have the expected format.
    #[error("the memory stream is invalid at byte {offset}: {detail}")]
    Invalid {
        /// Offset in the stream.
        offset: u64,
        /// What is wrong.
        detail: String,
    },
    /// The pages cannot be stored.
    #[error("cannot store the memory")]
    Store(#[source] holdfast_block::Error),
}

type Result<T> = std::result::Result<T, MemoryStreamError>;

/// The memory of a machine: its state, and the device with its pages.
pub type Memory = (MemoryState, Box<dyn BlockDeviceMut>);

/// Creates the device for the pages when the size is known.
pub type MakeStore<'a> = dyn FnMut(u64) -> holdfast_block::Result<Box<dyn BlockDeviceMut>> + Send + 'a;

/// Reads a stream to its end. `make_store` gets the size of the memory, and returns a zeroed device of this size.
///
/// # Errors
/// A stream with live sections besides memory, or with capabilities that change its format, is refused.
pub fn disassemble(input: &mut dyn Read, page_bytes: u64, make_store: &mut MakeStore<'_>) -> Result<Memory> {
    let mut parser = Parser {
        input,
        offset: 0,
        head: Some(Vec::new()),
        page_bytes,
        block: None,
    };
    if !is_page_size(page_bytes) {
        return Err(parser.invalid(format!("invalid page size: {page_bytes} bytes")));
    }
    let section_id = parser.beginning()?;
    let blocks = parser.sizes()?;
    let size_bytes = blocks.iter().map(|block| block.size_bytes).sum();
    let mut pages = Pages {
        // If the device cannot be created, no list of pages is needed.
        store: make_store(size_bytes).map_err(MemoryStreamError::Store)?,
        written: DirtyBitmap::new(size_bytes, page_bytes).map_err(MemoryStreamError::Store)?,
        run_start: 0,
        run: Vec::new(),
    };
    parser.records(&blocks, &mut pages)?;
    let (has_footers, next) = parser.first_footer(section_id)?;
    let head = parser.head.take().unwrap_or_default();
    // The byte after the first section belongs to the next one.
    let head = head[..head.len() - 1].to_vec();
    let (has_end, tail) = parser.parts(next, section_id, has_footers, &blocks, &mut pages)?;
    pages.write_run()?;
    let state = MemoryState {
        page_bytes,
        blocks,
        section_id,
        has_footers,
        has_end,
        head,
        tail,
    };
    Ok((state, pages.store))
}

struct Parser<'a> {
    input: &'a mut dyn Read,
    offset: u64,
    /// The bytes read so far, until the first page is expected.
    head: Option<Vec<u8>>,
    page_bytes: u64,
    /// Start and size of the block of the last page: a section that names no block continues with it.
    block: Option<(u64, u64)>,
}

impl Parser<'_> {
    fn invalid(&self, detail: String) -> MemoryStreamError {
        MemoryStreamError::Invalid {
            offset: self.offset,
            detail,
        }
    }

    fn read(&mut self, buffer: &mut [u8]) -> Result<()> {
        self.input.read_exact(buffer).map_err(|source| match source.kind() {
            ErrorKind::UnexpectedEof => MemoryStreamError::Short { offset: self.offset },
            _ => MemoryStreamError::Input {
                offset: self.offset,
                source,
            },
        })?;
        self.offset += buffer.len() as u64;
        if let Some(head) = &mut self.head {
            if head.len() + buffer.len() > HEAD_BYTES_MAX {
                return Err(MemoryStreamError::Invalid {
                    offset: self.offset,
                    detail: "no memory at its beginning".to_owned(),
                });
            }
            head.extend_from_slice(buffer);
        }
        Ok(())
    }

    fn bytes<const LENGTH: usize>(&mut self) -> Result<[u8; LENGTH]> {
        let mut bytes = [0; LENGTH];
        self.read(&mut bytes)?;
        Ok(bytes)
    }

    fn u8(&mut self) -> Result<u8> {
        Ok(self.bytes::<1>()?[0])
    }

    fn u32(&mut self) -> Result<u32> {
        Ok(u32::from_be_bytes(self.bytes()?))
    }

    fn u64(&mut self) -> Result<u64> {
        Ok(u64::from_be_bytes(self.bytes()?))
    }

    fn name(&mut self) -> Result<String> {
        let mut bytes = vec![0; usize::from(self.u8()?)];
        self.read(&mut bytes)?;
        String::from_utf8(bytes).map_err(|_| self.invalid("a name is not UTF-8".to_owned()))
    }

    /// Reads everything before the memory, and returns the id of its section.
    fn beginning(&mut self) -> Result<u32> {
        if (self.u32()?, self.u32()?) != (STREAM_MAGIC, STREAM_VERSION) {
            return Err(self.invalid("not a migration stream of version 3".to_owned()));
        }
        let mut kind = self.u8()?;
        if kind == section::CONFIGURATION {
            let length = self.u32()?;
            if length > TYPE_BYTES_MAX {
                return Err(self.invalid(format!("the name of the machine type has {length} bytes")));
            }
            self.read(&mut vec![0; length as usize])?;
            kind = self.u8()?;
            while kind == section::SUBSECTION {
                self.configuration_part()?;
                kind = self.u8()?;
            }
        }
        while kind == section::COMMAND {
            let [_, _, high, low] = self.bytes()?;
            self.read(&mut vec![0; usize::from(u16::from_be_bytes([high, low]))])?;
            kind = self.u8()?;
        }
        if kind != section::START {
            return Err(self.invalid(format!("a section of type {kind} precedes the memory")));
        }
        let id = self.u32()?;
        let name = self.name()?;
        let (_instance, _version) = (self.u32()?, self.u32()?);
        if name != RAM {
            return Err(self.invalid(format!("the live section {name:?} precedes the memory")));
        }
        Ok(id)
    }

    /// Subsections of the configuration have no length, so only the existing ones can be parsed.
    fn configuration_part(&mut self) -> Result<()> {
        let name = self.name()?;
        let _version = self.u32()?;
        match &name[..] {
            "configuration/target-page-bits" => self.u32().map(drop),
            "configuration/uuid" => self.bytes::<16>().map(drop),
            "configuration/capabilities" => {
                for _ in 0..self.u32()?.min(1000) {
                    self.name()?;
                }
                Ok(())
            }
            _ => Err(self.invalid(format!("the configuration has the unknown subsection {name:?}"))),
        }
    }

    /// Reads the blocks of the memory, and their sizes.
    fn sizes(&mut self) -> Result<Vec<RamBlock>> {
        let word = self.u64()?;
        let (mut left, flags) = (word & !(self.page_bytes - 1), word & (self.page_bytes - 1));
        if flags != record::SIZES {
            return Err(self.invalid(format!("a record with flags {flags:#x} instead of the block sizes")));
        }
        let mut blocks = Vec::new();
        while left > 0 {
            let block = RamBlock {
                name: self.name()?,
                size_bytes: self.u64()?,
            };
            let after = left.checked_sub(block.size_bytes);
            left = after.ok_or_else(|| self.invalid("the blocks are larger than the memory".to_owned()))?;
            blocks.push(block);
            if blocks.len() > BLOCK_COUNT_MAX as usize {
                return Err(self.invalid(format!("more than {BLOCK_COUNT_MAX} blocks")));
            }
        }
        if !are_possible(&blocks, self.page_bytes) {
            return Err(self.invalid("invalid name or size of a block".to_owned()));
        }
        Ok(blocks)
    }

    /// Reads the records of a section, until its end.
    fn records(&mut self, blocks: &[RamBlock], pages: &mut Pages) -> Result<()> {
        let mut page = vec![0; to_usize(self.page_bytes)];
        loop {
            let word = self.u64()?;
            let (address, flags) = (word & !(self.page_bytes - 1), word & (self.page_bytes - 1));
            if flags & record::END != 0 {
                return Ok(());
            }
            let kind = flags & !record::SAME_BLOCK;
            if kind != record::PAGE && kind != record::FILL {
                return Err(self.invalid(format!("unknown record flags {flags:#x}")));
            }
            if flags & record::SAME_BLOCK == 0 {
                let name = self.name()?;
                self.block = Some(self.place(blocks, &name)?);
            }
            let (start, size_bytes) = self
                .block
                .ok_or_else(|| self.invalid("a page without a block".to_owned()))?;
            if address >= size_bytes {
                return Err(self.invalid(format!(
                    "a page at {address}, outside of its block of {size_bytes} bytes"
                )));
            }
            if kind == record::PAGE {
                self.read(&mut page)?;
            } else {
                let byte = self.u8()?;
                page.fill(byte);
            }
            pages.put(start + address, &page)?;
        }
    }

    fn place(&self, blocks: &[RamBlock], name: &str) -> Result<(u64, u64)> {
        let mut start = 0;
        for block in blocks {
            if block.name == name {
                return Ok((start, block.size_bytes));
            }
            start += block.size_bytes;
        }
        Err(self.invalid(format!("a page of an unknown block {name:?}")))
    }

    /// Determines whether the first section has a footer, as all others then have, and reads the type of the next
    /// section.
    fn first_footer(&mut self, id: u32) -> Result<(bool, u8)> {
        let kind = self.u8()?;
        if kind != section::FOOTER {
            return Ok((false, kind));
        }
        self.footer_id(id)?;
        Ok((true, self.u8()?))
    }

    fn footer_id(&mut self, id: u32) -> Result<()> {
        match self.u32()? {
            found if found == id => Ok(()),
            found => Err(self.invalid(format!("the end of section {found} in section {id}"))),
        }
    }

    /// Reads the rest of the memory and of the stream. Returns whether the memory has an end section.
    fn parts(
        &mut self,
        first: u8,
        id: u32,
        has_footers: bool,
        blocks: &[RamBlock],
        pages: &mut Pages,
    ) -> Result<(bool, Vec<u8>)> {
        let mut kind = first;
        let mut has_end = false;
        while !has_end && (kind == section::PART || kind == section::END) {
            let found = self.u32()?;
            if found != id {
                return Err(self.invalid(format!("another live section, with id {found}")));
            }
            self.records(blocks, pages)?;
            if has_footers {
                if self.u8()? != section::FOOTER {
                    return Err(self.invalid("a section without an end".to_owned()));
                }
                self.footer_id(id)?;
            }
            has_end = kind == section::END;
            kind = self.u8()?;
        }
        let mut tail = vec![kind];
        let read = self.input.take(TAIL_BYTES_MAX).read_to_end(&mut tail);
        let read = read.map_err(|source| MemoryStreamError::Input {
            offset: self.offset,
            source,
        })?;
        if read as u64 == TAIL_BYTES_MAX {
            return Err(self.invalid(format!("the state of the devices has more than {TAIL_BYTES_MAX} bytes")));
        }
        Ok((has_end, tail))
    }
}

/// Pages to be written at their offsets.
struct Pages {
    store: Box<dyn BlockDeviceMut>,
    /// Ranges that may be non-zero.
    written: DirtyBitmap,
    run_start: u64,
    run: Vec<u8>,
}

impl Pages {
    fn put(&mut self, offset: u64, page: &[u8]) -> Result<()> {
        let length = page.len() as u64;
        let range = offset..offset + length;
        if !self.written.is_dirty(range.clone()) {
            if page.iter().all(|byte| *byte == 0) {
                return Ok(());
            }
            self.written.set(range);
        }
        let is_next = self.run_start + self.run.len() as u64 == offset;
        if !is_next || self.run.len() + page.len() > RUN_BYTES_MAX {
            self.write_run()?;
            self.run_start = offset;
        }
        self.run.extend_from_slice(page);
        Ok(())
    }

    fn write_run(&mut self) -> Result<()> {
        let run = std::mem::take(&mut self.run);
        if !run.is_empty() {
            self.store
                .write_at(&run, self.run_start)
                .map_err(MemoryStreamError::Store)?;
        }
        self.run = run;
        self.run.clear();
        Ok(())
    }
}
