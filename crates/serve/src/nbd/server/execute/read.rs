//! Reads: data, and holes where that is worth asking for.

use std::ops::Range;

use holdfast_block::{BlockDevice, ExtentKind, Result, to_usize};

use super::super::export::Absent;
use super::super::handshake::Session;
use super::super::reply::{Address, ReplyBuffer};
use super::super::request::{Fragments, Request};
use crate::nbd::wire::{ChunkKind, ErrorNumber, HeaderStyle, ReplyFlags};

/// Reads shorter than this are answered with data: asking where the holes are costs as much as reading so little.
const HOLE_QUESTION_BYTES_MIN: u64 = 64 << 10;
/// Holes shorter than this are data: a chunk costs more than their zeroes.
const HOLE_BYTES_MIN: u64 = 4096;
/// Chunks of one reply; what is beyond them is data.
const EXTENT_COUNT_MAX: usize = 64;

pub(super) fn read(
    session: &Session,
    request: &Request,
    fragments: Fragments,
    replies: &mut ReplyBuffer,
) -> Result<()> {
    let style = session.terms.style;
    let device = session.export.device().reader();
    let address = Address {
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
    let pieces = if fragments == Fragments::One || request.length < HOLE_QUESTION_BYTES_MIN {
        vec![(Content::Data, request.range())]
    } else {
        contents(device, session.export.absent(), request.range())
    };
    let last = pieces.len() - 1;
    for (number, (content, range)) in pieces.into_iter().enumerate() {
        // The whole reply is gathered before any of it is sent, so no error can come after its last chunk.
        let flags = if number == last {
            ReplyFlags::DONE
        } else {
            ReplyFlags::default()
        };
        let length = range.end - range.start;
        match content {
            Content::Data => {
                replies.chunk(style, address, flags, ChunkKind::OFFSET_DATA, 8 + length);
                replies.put(&range.start.to_be_bytes());
                device.read_at(replies.space(to_usize(length)), range.start)?;
            }
            Content::Hole => {
                let length = u32::try_from(length).expect("a read has at most 32 MiB");
                replies.chunk(style, address, flags, ChunkKind::OFFSET_HOLE, 12);
                replies.put(&range.start.to_be_bytes());
                replies.put(&length.to_be_bytes());
            }
        }
    }
    Ok(())
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Content {
    Data,
    Hole,
}

/// What `range`, which is not empty, is made of. A device that cannot say has data.
fn contents(device: &dyn BlockDevice, absent: Absent, range: Range<u64>) -> Vec<(Content, Range<u64>)> {
    let mut pieces: Vec<(Content, Range<u64>)> = Vec::new();
    let mut push = |content, range: Range<u64>| match pieces.last_mut() {
        Some((last, before)) if *last == content => before.end = range.end,
        _ if range.is_empty() => {}
        _ => pieces.push((content, range)),
    };
    let mut end = range.start;
    if let Ok(list) = device.extents(range.clone(), EXTENT_COUNT_MAX) {
        for extent in list.within(range.clone()) {
            let is_zero = match extent.kind {
                ExtentKind::Data => false,
                ExtentKind::Zero => true,
                ExtentKind::Absent => absent == Absent::ReadsAsZero,
            };
            let content = if is_zero && extent.length >= HOLE_BYTES_MIN {
                Content::Hole
            } else {
                Content::Data
            };
            push(content, extent.offset..extent.end());
            end = extent.end();
        }
    }
    push(Content::Data, end..range.end);
    pieces
}
