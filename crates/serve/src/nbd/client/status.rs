//! Validates replies to block status queries.

use super::export::MetaContext;
use super::violation::Violation;
use crate::nbd::wire::{Fields, HeaderStyle};

/// Limit of descriptors of one chunk: "a server SHOULD NOT send more than 2^20".
pub(super) const DESCRIPTOR_COUNT_MAX: u64 = 1 << 20;

/// The status of a range in one metadata context.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Descriptor {
    /// Length in bytes, never 0.
    pub(super) length: u64,
    pub(super) flags: u64,
}

/// The reply for one context: consecutive descriptors from the offset of the query on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Status {
    pub(super) context_id: u32,
    pub(super) descriptors: Vec<Descriptor>,
}

/// The range of a query.
#[derive(Debug, Clone, Copy)]
pub(super) struct Query {
    pub(super) offset: u64,
    pub(super) length: u64,
    /// The end of the export: extents are truncated there.
    pub(super) end: u64,
}

/// Size of one descriptor, and of the fields before the first one.
fn layout(style: HeaderStyle) -> (u64, u64) {
    match style {
        HeaderStyle::Simple | HeaderStyle::Structured => (8, 4),
        HeaderStyle::Extended => (16, 8),
    }
}

/// Checks the length of a chunk of descriptors before the chunk is read.
pub(super) fn check_length(length: u64, style: HeaderStyle) -> Result<(), Violation> {
    let (each, before) = layout(style);
    let is_right = length
        .checked_sub(before)
        .is_some_and(|rest| rest > 0 && rest % each == 0 && rest / each <= DESCRIPTOR_COUNT_MAX);
    if is_right {
        return Ok(());
    }
    Err(Violation::Size {
        what: "the length of its block status",
        found: length,
        allowed: "that of 1 to 2^20 extents",
    })
}

impl Status {
    /// Decodes the payload of a chunk, whose length was checked: u32 context, with extended headers u32 count, then
    /// descriptors.
    ///
    /// The last descriptor may reach beyond the query, as the protocol allows; it is truncated at the end of the
    /// export.
    pub(super) fn decode(payload: &[u8], style: HeaderStyle, query: Query) -> Result<Self, Violation> {
        let (each, before) = layout(style);
        let count = (payload.len() as u64 - before) / each;
        let mut fields = Fields(payload);
        let context_id = fields.u32();
        let nonsense = |what| Violation::Extents {
            offset: query.offset,
            what,
        };
        if style == HeaderStyle::Extended && u64::from(fields.u32()) != count {
            return Err(nonsense("another number of extents than it says"));
        }
        let mut descriptors = Vec::with_capacity(holdfast_block::to_usize(count));
        let mut covered = 0u64;
        for _ in 0..count {
            let (length, flags) = match style {
                HeaderStyle::Simple | HeaderStyle::Structured => (u64::from(fields.u32()), u64::from(fields.u32())),
                HeaderStyle::Extended => (fields.u64(), fields.u64()),
            };
            if length == 0 {
                return Err(nonsense("an extent of no bytes"));
            }
            if covered >= query.length {
                return Err(nonsense("extents past the end of the query"));
            }
            // The query lies inside the export, so a descriptor that begins inside the query begins before the end.
            let left = query.end - query.offset - covered;
            let Some(end) = covered.checked_add(length) else {
                return Err(nonsense("an extent whose end overflows"));
            };
            descriptors.push(Descriptor {
                length: length.min(left),
                flags,
            });
            covered = end;
        }
        Ok(Self {
            context_id,
            descriptors,
        })
    }
}

/// Checks that the reply covers every context of the connection.
pub(super) fn check_complete(statuses: &[Status], contexts: &[MetaContext], offset: u64) -> Result<(), Violation> {
    let is_answered = |context: &&MetaContext| statuses.iter().any(|status| status.context_id == context.id);
    match contexts.iter().find(|context| !is_answered(context)) {
        Some(context) => Err(Violation::ContextForgotten {
            offset,
            context: context.name.clone(),
        }),
        None => Ok(()),
    }
}
