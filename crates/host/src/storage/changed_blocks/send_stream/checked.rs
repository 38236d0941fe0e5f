//! Reads a stream sequentially, and verifies its checksums.

use std::io::{ErrorKind, Read};

use holdfast_block::to_usize;

use super::super::error::SendStreamError;
use super::Result;
use super::record::{BeginRecord, ByteOrder, RECORD_BYTES, RECORD_LENGTH, SUM_AT, StreamRecord};

/// Size of the pieces in which data is skipped.
const PIECE_BYTES: u64 = 64 << 10;
/// Limit on the kept bytes of a record's payload: enough for the attributes that are needed.
const KEPT_BYTES: u64 = 512;

/// Whether checksums are verified. A fuzzer rarely produces correct ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ChecksumMode {
    Held,
    #[cfg(feature = "hostile")]
    Ignored,
}

/// Fletcher's checksum over words of 32 bits, with four sums of 64 bits, as in ZFS.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Fletcher4([u64; 4]);

impl Fletcher4 {
    /// Adds words in the byte order of the sender; an incomplete word at the end is ignored.
    pub(super) fn take(&mut self, bytes: &[u8], order: ByteOrder) {
        // A separate loop per byte order avoids a branch for every word.
        match order {
            ByteOrder::Little => self.words(bytes, u32::from_le_bytes),
            ByteOrder::Big => self.words(bytes, u32::from_be_bytes),
        }
    }

    fn words(&mut self, bytes: &[u8], word: impl Fn([u8; 4]) -> u32) {
        let [mut a, mut b, mut c, mut d] = self.0;
        for bytes in bytes.chunks_exact(4) {
            a = a.wrapping_add(word(bytes.try_into().expect("four bytes")).into());
            b = b.wrapping_add(a);
            c = c.wrapping_add(b);
            d = d.wrapping_add(c);
        }
        self.0 = [a, b, c, d];
    }

    pub(super) fn sums(self) -> [u64; 4] {
        self.0
    }
}

/// A stream after its begin record.
pub(super) struct RecordReader<'a> {
    input: &'a mut dyn Read,
    order: ByteOrder,
    offset: u64,
    sum: Fletcher4,
    /// The checksum before the last record.
    sum_before: [u64; 4],
    sums: ChecksumMode,
}

impl<'a> RecordReader<'a> {
    /// Reads the begin record, which determines the byte order.
    pub(super) fn begin(input: &'a mut dyn Read, sums: ChecksumMode) -> Result<(Self, BeginRecord)> {
        let mut stream = Self {
            input,
            order: ByteOrder::Little,
            offset: 0,
            sum: Fletcher4::default(),
            sum_before: [0; 4],
            sums,
        };
        let mut bytes = [0; RECORD_LENGTH];
        stream.fill(&mut bytes)?;
        let (order, begin) = BeginRecord::parse(&bytes).ok_or_else(|| SendStreamError::Invalid {
            offset: 0,
            detail: "not a stream of zfs send".to_owned(),
        })?;
        stream.order = order;
        stream.sum.take(&bytes, order);
        Ok((stream, begin))
    }

    /// Bytes read so far.
    pub(super) fn offset(&self) -> u64 {
        self.offset
    }

    /// Reads the next record. Newer senders put a checksum of everything before it into each record; older ones leave
    /// the field zero.
    pub(super) fn record(&mut self) -> Result<StreamRecord> {
        let mut record = StreamRecord {
            order: self.order,
            offset: self.offset,
            bytes: [0; RECORD_LENGTH],
        };
        self.fill(&mut record.bytes)?;
        self.sum_before = self.sum.sums();
        self.sum.take(&record.bytes[..SUM_AT], self.order);
        let sum = record.sum(SUM_AT);
        if sum != [0; 4] {
            self.check(sum, self.sum.sums())?;
        }
        self.sum.take(&record.bytes[SUM_AT..], self.order);
        Ok(record)
    }

    /// Skips `length` bytes of data, and returns the first of them.
    pub(super) fn payload(&mut self, length: u64) -> Result<Vec<u8>> {
        let mut kept = vec![0; to_usize(length.min(KEPT_BYTES))];
        self.fill(&mut kept)?;
        self.sum.take(&kept, self.order);
        self.skip(length - kept.len() as u64)?;
        Ok(kept)
    }

    /// Skips `length` bytes of data.
    pub(super) fn skip(&mut self, length: u64) -> Result<()> {
        let mut piece = vec![0; to_usize(length.min(PIECE_BYTES))];
        let mut left = length;
        while left > 0 {
            let piece = &mut piece[..to_usize(left.min(PIECE_BYTES))];
            self.fill(piece)?;
            self.sum.take(piece, self.order);
            left -= piece.len() as u64;
        }
        Ok(())
    }

    /// Checks the end record, and that nothing follows it.
    pub(super) fn finish(&mut self, record: &StreamRecord) -> Result<()> {
        self.check(record.sum(8), self.sum_before)?;
        let mut byte = [0];
        match self.fill(&mut byte) {
            Err(SendStreamError::Short { .. }) => Ok(()),
            Err(error) => Err(error),
            Ok(()) => Err(SendStreamError::Invalid {
                offset: self.offset - 1,
                detail: "data after its end".to_owned(),
            }),
        }
    }

    fn check(&self, stored: [u64; 4], found: [u64; 4]) -> Result<()> {
        let is_right = stored == found || self.sums != ChecksumMode::Held;
        is_right.then_some(()).ok_or(SendStreamError::Damaged {
            offset: self.offset - RECORD_BYTES,
        })
    }

    fn fill(&mut self, buffer: &mut [u8]) -> Result<()> {
        let offset = self.offset;
        self.input.read_exact(buffer).map_err(|source| match source.kind() {
            ErrorKind::UnexpectedEof => SendStreamError::Short { offset },
            _ => SendStreamError::Input { offset, source },
        })?;
        self.offset += buffer.len() as u64;
        Ok(())
    }
}
