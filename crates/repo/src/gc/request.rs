//! The request, the plan and the report of gc.

use std::collections::BTreeMap;

use crate::id::PackId;

/// How to give space back.
#[derive(Debug, Clone, Copy)]
pub struct GcRequest {
    /// Packs of which at most this share is alive, in percent, are rewritten; 0 rewrites none.
    pub repack_below_percent: u8,
    /// Threads that compress what is rewritten; with none, everything is done by the caller.
    pub thread_count: usize,
}

/// What gc is going to do.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GcPlan {
    /// Unreferenced packs: how many, and their bytes.
    pub dead_pack_count: u64,
    /// Bytes of those packs.
    pub dead_bytes: u64,
    /// Packs that are mostly dead and will be rewritten.
    pub sparse_pack_count: u64,
    /// Bytes of those packs.
    pub sparse_bytes: u64,
    /// Packs that stay.
    pub live_pack_count: u64,
    /// Bytes of those packs.
    pub live_bytes: u64,
    /// Writers at work, for people: while there is one that began before gc, nothing is deleted.
    pub writers: Vec<String>,
    /// Packs that snapshots need and that do not exist.
    pub missing_packs: Vec<PackId>,
}

/// What gc did.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GcReport {
    /// What it was going to do.
    pub plan: GcPlan,
    /// Packs that were deleted.
    pub deleted_pack_count: u64,
    /// Bytes given back.
    pub freed_bytes: u64,
    /// Bytes given back of objects that writers had begun when they died.
    pub unfinished_bytes: u64,
    /// Bytes written to move what is alive.
    pub rewritten_bytes: u64,
    /// Writers that died and were cleared away, for people.
    pub cleared_writers: Vec<String>,
    /// Writers that have to end before the rest can be deleted, for people.
    pub waiting_for: Vec<String>,
    /// Packs that were to be rewritten and are damaged; they stay.
    pub damaged: Vec<String>,
}

/// Packs and their bytes; in order, like everything here that decides in which order the store is asked.
pub(crate) type Sizes = BTreeMap<PackId, u64>;
