//! Block status: allocation and dirty bitmaps.

use std::ops::Range;

use holdfast_block::{BlockDevice, DirtyBitmap, ExtentKind};

use super::super::handshake::NbdSession;
use super::super::reply::{ReplyBuffer, ReplyTarget};
use super::super::request::{Contexts, Extents, Request, RequestError, Terms, check_range};
use super::ExecuteError;
use crate::nbd::wire::{AllocationFlags, ChunkKind, ErrorNumber, Fields, HeaderStyle, ReplyFlags};
use crate::server::export_device::Absent;

/// Limit of extents of one chunk. The protocol allows 2^20; a client continues where the reply ends.
const EXTENT_COUNT_MAX: usize = 16 << 10;
/// Limit of queries to the device for one chunk, in case the device reports very small extents.
const QUERY_COUNT_MAX: usize = 64;
/// The flag of `qemu:dirty-bitmap:NAME`.
const DIRTY: u32 = 1;

pub(super) fn block_status(
    session: &NbdSession,
    request: &Request,
    extents: Extents,
    contexts: Contexts,
    payload: &[u8],
    replies: &mut ReplyBuffer,
) -> Result<(), ExecuteError> {
    let terms = &session.terms;
    let (range, numbers) = match contexts {
        Contexts::Selected => (request.range(), terms.contexts.clone()),
        Contexts::InPayload => filter(request, payload, terms)?,
    };
    let count_max = match extents {
        Extents::One => 1,
        Extents::Any => EXTENT_COUNT_MAX,
    };
    let address = ReplyTarget {
        cookie: request.cookie,
        offset: request.offset,
    };
    let last = numbers.len() - 1;
    for (index, number) in numbers.into_iter().enumerate() {
        let list = match session.export.bitmap(number) {
            Some(bitmap) => changes(bitmap, range.clone(), count_max),
            None => allocation(
                session.export.device().reader(),
                session.export.absent(),
                range.clone(),
                count_max,
            )?,
        };
        let flags = if index == last {
            ReplyFlags::DONE
        } else {
            ReplyFlags::default()
        };
        put(replies, terms.style, address, flags, number, &list);
    }
    Ok(())
}

/// The range and the contexts in a payload: "64 bits, effect length; n * 32 bits, list of metacontext ids to use".
fn filter(request: &Request, payload: &[u8], terms: &Terms) -> Result<(Range<u64>, Vec<u32>), RequestError> {
    let invalid = |reason| RequestError {
        error: ErrorNumber::EINVAL,
        reason,
    };
    let (length, numbers) = payload
        .split_first_chunk::<8>()
        .filter(|(_, numbers)| !numbers.is_empty() && numbers.len() % 4 == 0)
        .ok_or(invalid("the list of contexts is cut off"))?;
    let mut selected = Vec::new();
    for number in numbers.chunks_exact(4).map(|bytes| Fields(bytes).u32()) {
        if selected.contains(&number) || !terms.contexts.contains(&number) {
            return Err(invalid("a context is named twice, or was not selected"));
        }
        selected.push(number);
    }
    let request = Request {
        length: u64::from_be_bytes(*length),
        ..*request
    };
    check_range(&request, terms)?;
    Ok((request.range(), selected))
}

/// Lengths and flags of consecutive extents, none of them empty.
struct Statuses {
    list: Vec<(u64, u32)>,
    count_max: usize,
}

impl Statuses {
    fn new(count_max: usize) -> Self {
        Self {
            list: Vec::new(),
            count_max,
        }
    }

    /// Appends an extent, or extends the last one. Returns false if there is no space for another extent.
    fn push(&mut self, length: u64, flags: u32) -> bool {
        let is_full = self.list.len() == self.count_max;
        match self.list.last_mut() {
            _ if length == 0 => {}
            Some((before, same)) if *same == flags => *before += length,
            _ if is_full => return false,
            _ => self.list.push((length, flags)),
        }
        true
    }
}

/// The context `base:allocation`.
fn allocation(
    device: &dyn BlockDevice,
    absent: Absent,
    range: Range<u64>,
    count_max: usize,
) -> holdfast_block::Result<Vec<(u64, u32)>> {
    let hole = (AllocationFlags::HOLE | AllocationFlags::ZERO).0;
    let mut statuses = Statuses::new(count_max);
    let mut at = range.start;
    for _ in 0..QUERY_COUNT_MAX {
        if at >= range.end {
            break;
        }
        let list = device.extents(at..range.end, count_max)?;
        assert!(list.end() > at, "extents cover at least one byte");
        for extent in list.within(at..range.end) {
            let flags = match (extent.kind, absent) {
                (ExtentKind::Zero, _) | (ExtentKind::Absent, Absent::ReadsAsZero) => hole,
                (ExtentKind::Data, _) | (ExtentKind::Absent, Absent::MayHoldData) => 0,
            };
            if !statuses.push(extent.length, flags) {
                return Ok(statuses.list);
            }
        }
        at = list.end();
    }
    Ok(statuses.list)
}

/// The context of a dirty bitmap.
fn changes(bitmap: &DirtyBitmap, range: Range<u64>, count_max: usize) -> Vec<(u64, u32)> {
    let mut statuses = Statuses::new(count_max);
    let known_end = range.end.min(bitmap.size_bytes()).max(range.start);
    let mut at = range.start;
    while at < known_end {
        let dirty = bitmap.next_dirty(at).unwrap_or(known_end..known_end);
        let dirty = dirty.start.min(known_end)..dirty.end.min(known_end);
        if !statuses.push(dirty.start - at, 0) || !statuses.push(dirty.end - dirty.start, DIRTY) {
            return statuses.list;
        }
        at = dirty.end;
    }
    // The range after the end of the bitmap counts as changed.
    statuses.push(range.end - at, DIRTY);
    statuses.list
}

fn put(
    replies: &mut ReplyBuffer,
    style: HeaderStyle,
    address: ReplyTarget,
    flags: ReplyFlags,
    context: u32,
    list: &[(u64, u32)],
) {
    let count = u32::try_from(list.len()).expect("extents are bounded");
    if style == HeaderStyle::Extended {
        let length = 8 + 16 * u64::from(count);
        replies.chunk(style, address, flags, ChunkKind::BLOCK_STATUS_EXT, length);
        replies.put(&context.to_be_bytes());
        replies.put(&count.to_be_bytes());
        for (length, flags) in list {
            replies.put(&length.to_be_bytes());
            replies.put(&u64::from(*flags).to_be_bytes());
        }
        return;
    }
    replies.chunk(style, address, flags, ChunkKind::BLOCK_STATUS, 4 + 8 * u64::from(count));
    replies.put(&context.to_be_bytes());
    for (length, flags) in list {
        let length = u32::try_from(*length).expect("extents end with the request, whose length has 32 bits");
        replies.put(&length.to_be_bytes());
        replies.put(&flags.to_be_bytes());
    }
}
