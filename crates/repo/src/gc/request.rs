//! The request, the plan and the report of gc.

use std::collections::BTreeMap;

use crate::id::PackId;

/// Options of gc.
#[derive(Debug, Clone, Copy)]
pub struct GcRequest {
    /// Packs with at most this percentage of live data are rewritten; 0 rewrites none.
    pub repack_below_percent: u8,
    /// Number of threads that compress rewritten data; with 0 the caller does everything.
    pub thread_count: usize,
}

/// The plan of gc.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GcPlan {
    /// Number of unreferenced packs.
    pub dead_pack_count: u64,
    /// Bytes of those packs.
    pub dead_bytes: u64,
    /// Number of packs that are mostly dead and will be rewritten.
    pub sparse_pack_count: u64,
    /// Bytes of those packs.
    pub sparse_bytes: u64,
    /// Number of packs that stay.
    pub live_pack_count: u64,
    /// Bytes of those packs.
    pub live_bytes: u64,
    /// Active writers, for messages: nothing is deleted while one is active that began before gc.
    pub writers: Vec<String>,
    /// Missing packs that snapshots need.
    pub missing_packs: Vec<PackId>,
}

/// The result of gc.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GcReport {
    /// The plan.
    pub plan: GcPlan,
    /// Packs that were deleted.
    pub deleted_pack_count: u64,
    /// Freed bytes.
    pub freed_bytes: u64,
    /// Freed bytes of unfinished objects of dead writers.
    pub unfinished_bytes: u64,
    /// Bytes written to move live data.
    pub rewritten_bytes: u64,
    /// Dead writers that were cleared, for messages.
    pub cleared_writers: Vec<String>,
    /// Writers that must end before the rest can be deleted, for messages.
    pub waiting_for: Vec<String>,
    /// Packs that should have been rewritten but are damaged; they stay.
    pub damaged: Vec<String>,
}

/// Packs and their bytes; sorted, like everything that determines the order of requests to the store.
pub(crate) type Sizes = BTreeMap<PackId, u64>;
