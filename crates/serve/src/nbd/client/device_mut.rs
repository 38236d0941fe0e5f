//! An export as a device that is written.

use std::ops::Range;
use std::sync::{PoisonError, RwLock};

use holdfast_block::{BlockDevice, BlockDeviceMut, ExtentList, Request, RequestKind, to_usize};

use super::call::{Call, Sending};
use super::command::Command;
use super::device::{NbdDevice, cut};
use super::{Endpoint, Error, NbdOptions, Result};
use crate::nbd::wire::{ErrorNumber, ExportFlags};

/// Bytes that one request zeroes or trims: a slow server does that within any sensible time.
const EFFECT_BYTES_MAX: u64 = 128 << 20;
/// Zeroes to write where the server cannot write zeroes by itself.
static ZEROES: [u8; 64 << 10] = [0; 64 << 10];

/// An export of an NBD server that is read and written, by any number of threads at once.
///
/// There is no way to go on with a connection that is lost: what was written and not flushed may be gone.
///
/// Requests that do not fit the server's blocks are done by reading, changing and writing the blocks at both ends, while
/// all other writes through this device wait.
#[derive(Debug)]
pub struct NbdDeviceMut {
    device: NbdDevice,
    /// Held exclusively while a block is read, changed and written back.
    blocks: RwLock<()>,
}

impl NbdDeviceMut {
    /// Connects to `export`; the default one has an empty name.
    pub fn connect(endpoint: &Endpoint, export: &str, options: NbdOptions) -> Result<Self> {
        Self::new(NbdDevice::connect(endpoint, export, options)?)
    }

    /// Makes a device one that is written, where the server allows it.
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

    /// The device as one that is read.
    pub fn as_read(&self) -> &NbdDevice {
        &self.device
    }

    fn has(&self, flags: ExportFlags) -> bool {
        self.device.export().flags().has(flags)
    }

    /// The whole blocks of the server in `range`, and what is left at its start and its end.
    fn split(&self, range: &Range<u64>) -> [Range<u64>; 3] {
        let minimum = u64::from(self.device.export().block_sizes().minimum_bytes);
        // The last block may end with the export: it is whole then.
        let end = if range.end == self.device.size_bytes() {
            range.end
        } else {
            range.end / minimum * minimum
        };
        let start = range.start.next_multiple_of(minimum).min(range.end);
        let end = end.max(start);
        [range.start..start, start..end, end..range.end]
    }

    /// Runs `change` with reads of what was before allowed to nobody else, and what is known of extents forgotten.
    fn change<T>(&self, change: impl FnOnce() -> Result<T>) -> Result<T> {
        // Before, for answers on their way now are of before; after, for those on their way meanwhile.
        self.device.invalidate();
        let result = change();
        self.device.invalidate();
        result
    }

    fn write_anything(&self, data: &[u8], offset: u64) -> Result<()> {
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
        let connection = self.device.pick();
        let call = Call::new(&connection, &mut [], 0)?;
        let sendings = pieces.map(|piece| -> Sending<'_> {
            let from = to_usize(piece.offset - offset);
            (Command::of(piece), &data[from..from + to_usize(piece.length)])
        });
        call.run(sendings, window)?;
        Ok(())
    }

    /// Changes bytes that do not fill their blocks: to `data`, or to zeroes.
    fn write_in_blocks(&self, range: &Range<u64>, data: Option<&[u8]>) -> Result<()> {
        let _exclusive = self.blocks.write().unwrap_or_else(PoisonError::into_inner);
        let blocks = self.device.blocks_around(range);
        // A range that fills no block touches two at most.
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
            match self.device.run_plain(cut(request, EFFECT_BYTES_MAX).map(Command::of)) {
                // It may find the request too long, or its medium may not be able to.
                Err(Error::Server { number, .. }) if is_refusal(number) => {}
                done => return done,
            }
        }
        let connection = self.device.pick();
        let call = Call::new(&connection, &mut [], 0)?;
        let pieces = cut(
            Request {
                kind: RequestKind::Write,
                ..request
            },
            ZEROES.len() as u64,
        );
        let sendings =
            pieces.map(|piece| -> Sending<'static> { (Command::of(piece), &ZEROES[..to_usize(piece.length)]) });
        call.run(sendings, 16)?;
        Ok(())
    }
}

/// Whether an error says that the request is not possible in this way, rather than that it went wrong.
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
        Ok(self.change(|| self.write_anything(data, offset))?)
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

    /// Zeroes the range where the server can do that without writing; trims otherwise, where it can.
    ///
    /// The protocol leaves open what is read after a trim; servers are known to give zeroes or what was there before.
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
                    .run_plain(cut(request, EFFECT_BYTES_MAX).map(Command::fast_zero));
                if !matches!(&result, Err(Error::Server { number, .. }) if is_refusal(*number)) {
                    return result;
                }
                result = Ok(());
            }
            if self.has(ExportFlags::TRIM) {
                result = self.device.run_plain(cut(request, EFFECT_BYTES_MAX).map(Command::of));
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
    /// Fails where the server offers no flush: nobody could promise that anything is durable.
    fn flush(&self) -> holdfast_block::Result<()> {
        if !self.has(ExportFlags::FLUSH) {
            return Err(Error::Unsupported {
                server: self.device.server(),
                what: "flush",
                detail: "what was written to it may be lost in a power cut, and nobody would know",
            }
            .into());
        }
        let flush = Command::of(Request::flush());
        Ok(self.device.run_plain(std::iter::once(flush))?)
    }
}
