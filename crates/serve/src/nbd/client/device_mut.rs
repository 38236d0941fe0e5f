//! An export as a writable device.

use std::ops::Range;
use std::sync::{PoisonError, RwLock};

use holdfast_block::{BlockDevice, BlockDeviceMut, ExtentList, Request, RequestKind, to_usize};

use super::call::{Call, CommandWithData};
use super::command::ClientCommand;
use super::device::{NbdDevice, split_request};
use super::{Endpoint, Error, NbdOptions, Result};
use crate::nbd::wire::{ErrorNumber, ExportFlags};

/// Maximum number of bytes that one request zeroes or trims: even a slow server completes that within any sensible
/// timeout.
const EFFECT_BYTES_MAX: u64 = 128 << 20;
/// Zeroes to write if the server has no command for writing zeroes.
static ZEROES: [u8; 64 << 10] = [0; 64 << 10];

/// An export of an NBD server, read and written by any number of threads at once.
///
/// A lost connection cannot be replaced: writes that were not flushed may be lost.
///
/// For a request that is not aligned to the server's blocks, the blocks at both ends are read, changed and written
/// back. All other writes through this device wait meanwhile.
#[derive(Debug)]
pub struct NbdDeviceMut {
    device: NbdDevice,
    /// Held exclusively while a block is read, changed and written back.
    blocks: RwLock<()>,
}

impl NbdDeviceMut {
    /// Connects to `export`; the default export has an empty name.
    pub fn connect(endpoint: &Endpoint, export: &str, options: NbdOptions) -> Result<Self> {
        Self::new(NbdDevice::connect(endpoint, export, options)?)
    }

    /// Makes a device writable, if the server allows it.
    pub fn new(device: NbdDevice) -> Result<Self> {
        if device.export().is_read_only() {
            return Err(Error::ReadOnly {
                server: device.server(),
                export: device.export().name().to_owned(),
            });
        }
        Ok(Self {
            device,
            blocks: RwLock::default(),
        })
    }

    /// The device, for reading.
    pub fn as_read(&self) -> &NbdDevice {
        &self.device
    }

    fn has(&self, flags: ExportFlags) -> bool {
        self.device.export().flags().has(flags)
    }

    /// The whole blocks of the server in `range`, and the partial blocks at the start and the end of `range`.
    fn split(&self, range: &Range<u64>) -> [Range<u64>; 3] {
        let minimum = u64::from(self.device.export().block_sizes().minimum_bytes);
        // The last block may end with the export: it counts as whole.
        let end = if range.end == self.device.size_bytes() {
            range.end
        } else {
            range.end / minimum * minimum
        };
        let start = range.start.next_multiple_of(minimum).min(range.end);
        let end = end.max(start);
        [range.start..start, start..end, end..range.end]
    }

    /// Runs `change`, and invalidates cached extents before and after it.
    fn change<T>(&self, change: impl FnOnce() -> Result<T>) -> Result<T> {
        // Before, because replies already in transit describe the old state; after, because more replies may arrive
        // during the change.
        self.device.invalidate();
        let result = change();
        self.device.invalidate();
        result
    }

    fn write_unaligned(&self, data: &[u8], offset: u64) -> Result<()> {
        let range = offset..offset + data.len() as u64;
        let [head, middle, tail] = self.split(&range);
        let part = |part: &Range<u64>| &data[to_usize(part.start - offset)..to_usize(part.end - offset)];
        if !middle.is_empty() {
            let _shared = self.blocks.read().unwrap_or_else(PoisonError::into_inner);
            self.write_blocks(part(&middle), middle.start)?;
        }
        for edge in [head, tail].iter().filter(|edge| !edge.is_empty()) {
            self.write_in_blocks(edge, Some(part(edge)))?;
        }
        Ok(())
    }

    /// Writes whole blocks of the server.
    fn write_blocks(&self, data: &[u8], offset: u64) -> Result<()> {
        let (pieces, window) = self
            .device
            .pieces(Request::new(RequestKind::Write, offset, data.len() as u64));
        let connection = self.device.least_busy();
        let call = Call::new(&connection, &mut [], 0)?;
        let sendings = pieces.map(|piece| -> CommandWithData<'_> {
            let from = to_usize(piece.offset - offset);
            (ClientCommand::of(piece), &data[from..from + to_usize(piece.length)])
        });
        call.run(sendings, window)?;
        Ok(())
    }

    /// Changes a part of a block to `data`, or to zeroes.
    fn write_in_blocks(&self, range: &Range<u64>, data: Option<&[u8]>) -> Result<()> {
        let _exclusive = self.blocks.write().unwrap_or_else(PoisonError::into_inner);
        let blocks = self.device.blocks_around(range);
        // A range that contains no whole block touches at most two blocks.
        let mut bytes = vec![0; to_usize(blocks.end - blocks.start)];
        self.device.read_blocks(&mut bytes, blocks.start)?;
        let target = &mut bytes[to_usize(range.start - blocks.start)..to_usize(range.end - blocks.start)];
        match data {
            Some(data) => target.copy_from_slice(data),
            None => target.fill(0),
        }
        self.write_blocks(&bytes, blocks.start)
    }

    /// Zeroes whole blocks of the server.
    fn zero_blocks(&self, range: Range<u64>) -> Result<()> {
        let request = Request::of_range(RequestKind::WriteZeroes, &range);
        if self.has(ExportFlags::WRITE_ZEROES) {
            match self
                .device
                .run_plain(split_request(request, EFFECT_BYTES_MAX).map(ClientCommand::of))
            {
                // The server may reject the length, or its storage may not support the request.
                Err(Error::Server { number, .. }) if is_refusal(number) => {}
                done => return done,
            }
        }
        let connection = self.device.least_busy();
        let call = Call::new(&connection, &mut [], 0)?;
        let pieces = split_request(
            Request {
                kind: RequestKind::Write,
                ..request
            },
            ZEROES.len() as u64,
        );
        let sendings = pieces
            .map(|piece| -> CommandWithData<'static> { (ClientCommand::of(piece), &ZEROES[..to_usize(piece.length)]) });
        call.run(sendings, 16)?;
        Ok(())
    }
}

/// Whether an error means that the server does not support this request, not that the request failed.
fn is_refusal(number: u32) -> bool {
    matches!(
        ErrorNumber(number),
        ErrorNumber::ENOTSUP | ErrorNumber::EINVAL | ErrorNumber::EOVERFLOW
    )
}

impl BlockDevice for NbdDeviceMut {
    fn size_bytes(&self) -> u64 {
        self.device.size_bytes()
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> holdfast_block::Result<()> {
        self.device.read_at(buffer, offset)
    }

    fn extents(&self, range: Range<u64>, extent_count_max: usize) -> holdfast_block::Result<ExtentList> {
        self.device.extents(range, extent_count_max)
    }

    fn block_size_bytes(&self) -> u32 {
        self.device.block_size_bytes()
    }
}

impl BlockDeviceMut for NbdDeviceMut {
    fn write_at(&self, data: &[u8], offset: u64) -> holdfast_block::Result<()> {
        self.check_bounds(offset, data.len() as u64)?;
        if data.is_empty() {
            return Ok(());
        }
        Ok(self.change(|| self.write_unaligned(data, offset))?)
    }

    fn write_zeroes(&self, range: Range<u64>) -> holdfast_block::Result<()> {
        self.check_bounds(range.start, range.end.saturating_sub(range.start))?;
        if range.is_empty() {
            return Ok(());
        }
        let [head, middle, tail] = self.split(&range);
        Ok(self.change(|| {
            if !middle.is_empty() {
                let _shared = self.blocks.read().unwrap_or_else(PoisonError::into_inner);
                self.zero_blocks(middle)?;
            }
            for edge in [head, tail].iter().filter(|edge| !edge.is_empty()) {
                self.write_in_blocks(edge, None)?;
            }
            Ok(())
        })?)
    }

    /// Zeroes the range if the server can do so without writing data; otherwise trims it, if possible.
    ///
    /// The protocol leaves the contents after a trim undefined; known servers return zeroes or the old data.
    fn trim(&self, range: Range<u64>) -> holdfast_block::Result<()> {
        self.check_bounds(range.start, range.end.saturating_sub(range.start))?;
        if range.is_empty() {
            return Ok(());
        }
        let [_, middle, _] = self.split(&range);
        if middle.is_empty() {
            return Ok(());
        }
        let request = Request::of_range(RequestKind::Trim, &middle);
        let shared = self.blocks.read().unwrap_or_else(PoisonError::into_inner);
        let result = self.change(|| {
            let mut result = Ok(());
            if self.has(ExportFlags::FAST_ZERO) && self.has(ExportFlags::WRITE_ZEROES) {
                result = self
                    .device
                    .run_plain(split_request(request, EFFECT_BYTES_MAX).map(ClientCommand::fast_zero));
                if !matches!(&result, Err(Error::Server { number, .. }) if is_refusal(*number)) {
                    return result;
                }
                result = Ok(());
            }
            if self.has(ExportFlags::TRIM) {
                result = self
                    .device
                    .run_plain(split_request(request, EFFECT_BYTES_MAX).map(ClientCommand::of));
            }
            match result {
                Err(Error::Server { number, .. }) if is_refusal(number) => Ok(()),
                result => result,
            }
        });
        drop(shared);
        Ok(result?)
    }

    /// Makes all completed writes durable, over all connections.
    ///
    /// Fails if the server does not support flush, because durability cannot be guaranteed then.
    fn flush(&self) -> holdfast_block::Result<()> {
        if !self.has(ExportFlags::FLUSH) {
            return Err(Error::Unsupported {
                server: self.device.server(),
                what: "flush",
                detail: "a power cut may lose what was written",
            }
            .into());
        }
        let flush = ClientCommand::of(Request::flush());
        Ok(self.device.run_plain(std::iter::once(flush))?)
    }
}
