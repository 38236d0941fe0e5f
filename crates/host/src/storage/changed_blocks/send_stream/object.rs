//! Decides whether an OBJECT record describes the requested file.
//!
//! The payload of the record contains the attributes of the file ("bonus") in one of two forms. In both, mode, size
//! and the creating transaction (`gen`) have fixed offsets if ZFS itself created the file. The offsets are trusted
//! only if the mode is that of a regular file, and the size equals the size that the caller sees.

use super::record::{ByteOrder, StreamRecord};
use super::{SendStreamQuery, StreamObject, WholeFileReason};

/// The content of a file.
const TYPE_FILE: u32 = 19;
/// The content of a volume.
const TYPE_VOLUME: u32 = 23;
/// Attributes at fixed offsets (`znode_phys_t`), before version 5 of file systems.
const BONUS_FIXED: u32 = 17;
/// System attributes: a header, then attributes in the order of a layout.
const BONUS_ATTRIBUTES: u32 = 44;
/// First word of system attributes.
const MAGIC_ATTRIBUTES: u32 = 0x2F_505A;

/// The file type in a mode, and that of a regular file.
const MODE_KIND: u64 = 0o170_000;
const MODE_REGULAR: u64 = 0o100_000;

/// Limit on the block size in streams without large blocks.
const BLOCK_BYTES_MAX_OLD: u64 = 128 << 10;

/// How a stream sends blocks larger than 128 KiB.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LargeBlocks {
    /// Unchanged.
    Kept,
    /// In pieces of 128 KiB.
    Split,
}

/// Returns why all of the object is changed; none if it is not.
pub(super) fn look_at_object(
    record: &StreamRecord,
    bonus: &[u8],
    query: &SendStreamQuery,
    large_blocks: LargeBlocks,
) -> Option<WholeFileReason> {
    let (object_type, bonus_type) = record.object_types();
    let StreamObject::File {
        block_before_bytes,
        from_transaction,
        ..
    } = query.object
    else {
        return (object_type != TYPE_VOLUME).then_some(WholeFileReason::Kind);
    };
    if object_type != TYPE_FILE {
        return Some(WholeFileReason::Kind);
    }
    let block_sent_bytes = match large_blocks {
        LargeBlocks::Kept => block_before_bytes,
        LargeBlocks::Split => block_before_bytes.min(BLOCK_BYTES_MAX_OLD),
    };
    if u64::from(record.block_bytes()) != block_sent_bytes {
        return Some(WholeFileReason::BlockSize);
    }
    let made = if record.is_raw_object() {
        None
    } else {
        transaction_of(bonus, bonus_type, record.order, query.size_after_bytes)
    };
    match (made, from_transaction) {
        (Some(made), Some(from)) if made <= from => None,
        (Some(_), Some(_)) => Some(WholeFileReason::Replaced),
        _ => Some(WholeFileReason::AgeUnknown),
    }
}

/// The transaction that created the file, if the attributes are those of a file of `size_bytes`.
fn transaction_of(bonus: &[u8], bonus_type: u32, order: ByteOrder, size_bytes: u64) -> Option<u64> {
    let (mode_at, size_at, made_at) = match bonus_type {
        BONUS_FIXED => (72, 80, 64),
        BONUS_ATTRIBUTES => {
            if bonus.len() < 8 || order.u32(bonus, 0) != MAGIC_ATTRIBUTES {
                return None;
            }
            // The upper bits of a word of two bytes have the length of the header, in units of eight bytes.
            let layout = [bonus[4], bonus[5]];
            let layout = match order {
                ByteOrder::Little => u16::from_le_bytes(layout),
                ByteOrder::Big => u16::from_be_bytes(layout),
            };
            let start = usize::from(layout >> 10) * 8;
            (start, start + 8, start + 16)
        }
        _ => return None,
    };
    if bonus.len() < mode_at.max(size_at).max(made_at) + 8 {
        return None;
    }
    let is_the_file = order.u64(bonus, mode_at) & MODE_KIND == MODE_REGULAR && order.u64(bonus, size_at) == size_bytes;
    is_the_file.then(|| order.u64(bonus, made_at))
}
