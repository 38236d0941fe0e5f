//! Whether an OBJECT record is about the file that the caller means.
//!
//! Its payload has the attributes of the file ("bonus"). They have one of two forms, in both of which mode, size and the
//! transaction that made the file (`gen`) stand at places of their own for files that ZFS itself has made. The places are only
//! believed where the mode is that of a file and the size is the one that the caller sees.

use super::record::{ByteOrder, StreamRecord};
use super::{SendStreamQuery, StreamObject, WholeFileReason};

/// The content of a file.
const TYPE_FILE: u32 = 19;
/// The content of a volume.
const TYPE_VOLUME: u32 = 23;
/// Attributes at fixed places (`znode_phys_t`), before version 5 of file systems.
const BONUS_FIXED: u32 = 17;
/// System attributes: a head, then attributes in the order of a layout.
const BONUS_ATTRIBUTES: u32 = 44;
/// First word of system attributes.
const MAGIC_ATTRIBUTES: u32 = 0x2F_505A;

/// The kind of a file in its mode, and a regular one.
const MODE_KIND: u64 = 0o170_000;
const MODE_REGULAR: u64 = 0o100_000;

/// Blocks are cut to this in streams without large blocks.
const BLOCK_BYTES_MAX_OLD: u64 = 128 << 10;

/// Why all of the object counts as changed, if so.
pub(super) fn look_at_object(
    record: &StreamRecord,
    bonus: &[u8],
    question: &SendStreamQuery,
    has_large_blocks: bool,
) -> Option<WholeFileReason> {
    let (object_type, bonus_type) = record.object_types();
    let StreamObject::File {
        block_before_bytes,
        from_transaction,
        ..
    } = question.object
    else {
        return (object_type != TYPE_VOLUME).then_some(WholeFileReason::Kind);
    };
    if object_type != TYPE_FILE {
        return Some(WholeFileReason::Kind);
    }
    let block_sent_bytes = if has_large_blocks {
        block_before_bytes
    } else {
        block_before_bytes.min(BLOCK_BYTES_MAX_OLD)
    };
    if u64::from(record.block_bytes()) != block_sent_bytes {
        return Some(WholeFileReason::BlockSize);
    }
    let made = if record.is_raw_object() {
        None
    } else {
        transaction_of(bonus, bonus_type, record.order, question.size_after_bytes)
    };
    match (made, from_transaction) {
        (Some(made), Some(from)) if made <= from => None,
        (Some(_), Some(_)) => Some(WholeFileReason::Replaced),
        _ => Some(WholeFileReason::AgeUnknown),
    }
}

/// The transaction in which the file was made, if the attributes are those of a file of `size_bytes`.
fn transaction_of(bonus: &[u8], bonus_type: u32, order: ByteOrder, size_bytes: u64) -> Option<u64> {
    let (mode_at, size_at, made_at) = match bonus_type {
        BONUS_FIXED => (72, 80, 64),
        BONUS_ATTRIBUTES => {
            if bonus.len() < 8 || order.u32(bonus, 0) != MAGIC_ATTRIBUTES {
                return None;
            }
            // The length of the head, in words of eight bytes, is in the upper bits of a word of two bytes.
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
