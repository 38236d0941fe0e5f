//! The records of a stream: 312 bytes each, followed by a payload.
//!
//! Names and offsets are those of `dmu_replay_record_t` in OpenZFS's `include/sys/zfs_ioctl.h`. Numbers have the byte
//! order of the sender.

use holdfast_block::to_usize;

use super::super::error::SendStreamError;
use super::Result;

/// Length of a record.
pub(crate) const RECORD_BYTES: u64 = 312;
pub(crate) const RECORD_LENGTH: usize = to_usize(RECORD_BYTES);
/// Offset of the checksum of everything before it, in each record but the first.
pub(crate) const SUM_AT: usize = RECORD_LENGTH - 32;

/// First word of the begin record, after its header.
pub(crate) const MAGIC: u64 = 0x2_F5BA_CBAC;

pub(crate) const DATASET_FILES: u32 = 2;
pub(crate) const DATASET_VOLUME: u32 = 3;

/// Limit on the payload: ZFS blocks have at most 16 MiB, also after rounding up to the sectors of the pool.
const PAYLOAD_BYTES_MAX: u64 = 16 << 20;

/// Feature flags, in the version word of a stream.
pub(crate) mod feature {
    /// Blocks are references to blocks of other snapshots.
    pub(crate) const DEDUPLICATED: u64 = 0b11;
    pub(crate) const LARGE_BLOCKS: u64 = 1 << 19;
    pub(crate) const RESUMING: u64 = 1 << 20;
    pub(crate) const REDACTED: u64 = 1 << 21;
    pub(crate) const RAW: u64 = 1 << 24;
    /// Several streams in one, with holds.
    pub(crate) const HOLDS: u64 = 1 << 26;
    /// Deduplicated (0, 1), spill blocks (2), embedded (16), compressed (17, 22, 25), large blocks (19, 27), large
    /// dnodes (23), raw (24), holds (26), long names (28), large directories (29). No feature changes the ranges in
    /// records.
    pub(crate) const KNOWN: u64 = 0b111 | 1 << 16 | 1 << 17 | LARGE_BLOCKS | RESUMING | REDACTED | 0xff << 22;
}

/// Types of records.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RecordKind {
    Begin,
    Object,
    FreeObjects,
    Write,
    Free,
    End,
    WriteByReference,
    Spill,
    WriteEmbedded,
    ObjectRange,
    Redact,
}

const KINDS: [RecordKind; 11] = [
    RecordKind::Begin,
    RecordKind::Object,
    RecordKind::FreeObjects,
    RecordKind::Write,
    RecordKind::Free,
    RecordKind::End,
    RecordKind::WriteByReference,
    RecordKind::Spill,
    RecordKind::WriteEmbedded,
    RecordKind::ObjectRange,
    RecordKind::Redact,
];

/// The byte order of numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ByteOrder {
    Little,
    Big,
}

impl ByteOrder {
    pub(crate) fn u32(self, bytes: &[u8], at: usize) -> u32 {
        let bytes = bytes[at..at + 4].try_into().expect("four bytes");
        match self {
            Self::Little => u32::from_le_bytes(bytes),
            Self::Big => u32::from_be_bytes(bytes),
        }
    }

    pub(crate) fn u64(self, bytes: &[u8], at: usize) -> u64 {
        let bytes = bytes[at..at + 8].try_into().expect("eight bytes");
        match self {
            Self::Little => u64::from_le_bytes(bytes),
            Self::Big => u64::from_be_bytes(bytes),
        }
    }
}

/// The begin record.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BeginRecord {
    pub(crate) payload_bytes: u32,
    pub(crate) version_word: u64,
    pub(crate) features: u64,
    pub(crate) dataset_type: u32,
    pub(crate) flags: u32,
    pub(crate) to_guid: u64,
    pub(crate) from_guid: u64,
}

impl BeginRecord {
    /// Parses the record and its byte order; none if it is not a begin record.
    pub(crate) fn parse(bytes: &[u8; RECORD_LENGTH]) -> Option<(ByteOrder, Self)> {
        let is_magic = |order: &ByteOrder| order.u64(bytes, 8) == MAGIC && order.u32(bytes, 0) == 0;
        let order = [ByteOrder::Little, ByteOrder::Big].into_iter().find(is_magic)?;
        let version_word = order.u64(bytes, 16);
        let begin = Self {
            payload_bytes: order.u32(bytes, 4),
            version_word,
            features: version_word >> 2 & ((1 << 56) - 1),
            dataset_type: order.u32(bytes, 32),
            flags: order.u32(bytes, 36),
            to_guid: order.u64(bytes, 40),
            from_guid: order.u64(bytes, 48),
        };
        Some((order, begin))
    }

    pub(crate) fn is_single(&self) -> bool {
        self.version_word & 0b11 == 1
    }

    pub(crate) fn is_compound(&self) -> bool {
        self.version_word & 0b11 == 2
    }
}

/// The full name of the snapshot, `tank/vm@a`, in a begin record; none if it is not a terminated string.
pub(crate) fn name_in_beginning(bytes: &[u8; RECORD_LENGTH]) -> Option<&str> {
    let field = bytes.get(56..)?;
    let length = field.iter().position(|byte| *byte == 0)?;
    std::str::from_utf8(&field[..length]).ok()
}

/// A record after the begin record.
pub(crate) struct StreamRecord {
    pub(crate) order: ByteOrder,
    /// Offset in the stream.
    pub(crate) offset: u64,
    pub(crate) bytes: [u8; RECORD_LENGTH],
}

impl StreamRecord {
    pub(crate) fn invalid(&self, detail: String) -> SendStreamError {
        SendStreamError::Invalid {
            offset: self.offset,
            detail,
        }
    }

    fn u32(&self, at: usize) -> u32 {
        self.order.u32(&self.bytes, at)
    }

    fn u64(&self, at: usize) -> u64 {
        self.order.u64(&self.bytes, at)
    }

    /// A checksum: four words.
    pub(crate) fn sum(&self, at: usize) -> [u64; 4] {
        [0, 8, 16, 24].map(|word| self.u64(at + word))
    }

    pub(crate) fn kind(&self) -> Result<RecordKind> {
        let number = self.u32(0);
        let found = KINDS.get(number as usize).copied();
        found.ok_or_else(|| self.invalid(format!("a record of kind {number}")))
    }

    /// The object number in a record of any type but `BeginRecord`, `FreeObjects`, `ObjectRange` and `End`.
    pub(crate) fn object(&self) -> u64 {
        self.u64(8)
    }

    /// First object number and number of objects in `FreeObjects`.
    pub(crate) fn objects(&self) -> (u64, u64) {
        (self.u64(8), self.u64(16))
    }

    /// Offset and length of a written or freed range.
    pub(crate) fn range(&self, kind: RecordKind) -> (u64, u64) {
        match kind {
            RecordKind::Write => (self.u64(24), self.u64(32)),
            _ => (self.u64(16), self.u64(24)),
        }
    }

    /// Type of an `Object`, and type of its payload.
    pub(crate) fn object_types(&self) -> (u32, u32) {
        (self.u32(16), self.u32(20))
    }

    /// Block size of an `Object`.
    pub(crate) fn block_bytes(&self) -> u32 {
        self.u32(24)
    }

    /// Whether the payload of an `Object` is raw: encrypted, as stored on the disk.
    pub(crate) fn is_raw_object(&self) -> bool {
        self.u32(36) != 0
    }

    /// Length of the payload.
    pub(crate) fn payload_bytes(&self, kind: RecordKind) -> Result<u64> {
        let bytes = match kind {
            RecordKind::Object if self.is_raw_object() => self.u32(36).into(),
            RecordKind::Object => u64::from(self.u32(28)).next_multiple_of(8),
            RecordKind::Write if self.bytes[50] != 0 => self.u64(96),
            RecordKind::Write => self.u64(32),
            RecordKind::Spill if self.u64(40) != 0 => self.u64(40),
            RecordKind::Spill => self.u64(16),
            RecordKind::WriteEmbedded => u64::from(self.u32(52)).next_multiple_of(8),
            _ => 0,
        };
        // The checksum needs words of four bytes.
        if bytes > PAYLOAD_BYTES_MAX || !bytes.is_multiple_of(4) {
            return Err(self.invalid(format!("a record with {bytes} bytes of data")));
        }
        Ok(bytes)
    }
}
