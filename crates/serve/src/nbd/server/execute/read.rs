//! Reads: data, and holes if a query for them is worth its time.

use std::ops::Range;

use holdfast_block::{Result, to_usize};

use super::super::reply::{ReplyBuffer, ReplyTarget};
use super::super::request::{Fragments, Request};
use super::holes::Content;
use super::{Drain, Executor};
use crate::nbd::wire::{ChunkKind, ErrorNumber, HeaderStyle, ReplyFlags};

/// Shorter reads return data: a query for holes takes as long as the read.
const HOLE_QUERY_BYTES_MIN: u64 = 64 << 10;
/// Long reads are sent in parts: the peer processes one part while the next is read, and a part fits into a processor's
/// cache.
const PART_BYTES: u64 = 256 << 10;

pub(super) fn read(
    executor: &Executor,
    request: &Request,
    fragments: Fragments,
    replies: &mut ReplyBuffer,
    mut drain: Drain<'_>,
) -> Result<()> {
    let session = &executor.session;
    let style = session.terms.style;
    let device = session.export.device().reader();
    let address = ReplyTarget {
        cookie: request.cookie,
        offset: request.offset,
    };
    if style == HeaderStyle::Simple {
        replies.simple(address, ErrorNumber::OK);
        return device.read_at(replies.space(to_usize(request.length)), request.offset);
    }
    // A chunk of data or of a hole has at least one byte.
    if request.length == 0 {
        replies.success(style, address);
        return Ok(());
    }
    let chunk_bytes_max = if fragments == Fragments::One || drain.is_none() {
        request.length
    } else {
        PART_BYTES
    };
    for (content, range) in pieces(executor, request, fragments) {
        if content == Content::Hole {
            let length = u32::try_from(range.end - range.start).expect("a read has at most 32 MiB");
            replies.chunk(style, address, done_at(range.end, request), ChunkKind::OFFSET_HOLE, 12);
            replies.put(&range.start.to_be_bytes());
            replies.put(&length.to_be_bytes());
            continue;
        }
        let mut at = range.start;
        while at < range.end {
            let length = chunk_bytes_max.min(range.end - at);
            let flags = done_at(at + length, request);
            replies.chunk(style, address, flags, ChunkKind::OFFSET_DATA, 8 + length);
            replies.put(&at.to_be_bytes());
            // The data is read before the header is sent, so a chunk is never truncated. If the data of a later chunk
            // cannot be read, an error chunk follows.
            device.read_at(replies.space(to_usize(length)), at)?;
            at += length;
            if let Some(drain) = &mut drain
                && replies.len() as u64 >= PART_BYTES
                && at < request.range().end
            {
                drain(replies);
            }
        }
    }
    Ok(())
}

/// The flags of a chunk that ends at `end`.
fn done_at(end: u64, request: &Request) -> ReplyFlags {
    if end == request.range().end {
        ReplyFlags::DONE
    } else {
        ReplyFlags::default()
    }
}

/// The contents of the range of `request`, which is not empty.
fn pieces(executor: &Executor, request: &Request, fragments: Fragments) -> Vec<(Content, Range<u64>)> {
    if fragments == Fragments::One || request.length < HOLE_QUERY_BYTES_MIN {
        return vec![(Content::Data, request.range())];
    }
    let export = &executor.session.export;
    let device = export.device().reader();
    executor
        .holes
        .contents(device, export.absent(), request.range(), &*executor.clock)
}
