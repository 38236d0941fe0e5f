//! What a sender has sent, and what is left. It outlives connections.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use holdfast_block::DirtyBitmap;

use crate::digest::{Digest, UnitDigests, UnitState};
use crate::layout::UnitLayout;
use crate::wire::{Accept, Capabilities, ReceiverId};

/// What a read is for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ReadRequest {
    pub(super) range: Range<u64>,
    pub(super) purpose: ReadPurpose,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ReadPurpose {
    Send,
    /// The hash of this unit is sent.
    Compare(u64),
}

/// The progress of a copy.
#[derive(Debug)]
pub(super) struct CopyProgress {
    pub(super) digests: UnitDigests,
    /// What this pass still has to read. A write to these ranges needs no other mark: they are read later.
    pub(super) pending: DirtyBitmap,
    /// What was written, and belongs to the next pass.
    later: DirtyBitmap,
    /// Units to compare by hash before anything is sent.
    pub(super) to_compare: BTreeSet<u64>,
    /// Hashes that were sent and not answered.
    compared: BTreeMap<u64, Digest>,
    /// Where the last read of the pass ended.
    cursor: u64,
    reads: BTreeMap<u64, ReadRequest>,
    /// Bytes of `reads`.
    reading_bytes: u64,
    read_count: u64,
    /// The receiver to which `digests` applies.
    receiver: Option<ReceiverId>,
    pub(super) is_first_pass: bool,
    /// The last synchronization that was sent, and the last that the receiver confirmed.
    pub(super) sync_sent: u64,
    sync_confirmed: u64,
    /// Units of synchronizations that are not confirmed.
    in_sync: BTreeSet<u64>,
}

impl CopyProgress {
    /// `granularity_bytes` is that of the tracker.
    pub(super) fn new(layout: UnitLayout, granularity_bytes: u32) -> holdfast_block::Result<Self> {
        let empty = DirtyBitmap::new(layout.size_bytes(), u64::from(granularity_bytes))?;
        Ok(Self {
            digests: UnitDigests::new(layout),
            pending: empty.clone(),
            later: empty,
            to_compare: BTreeSet::new(),
            compared: BTreeMap::new(),
            cursor: 0,
            reads: BTreeMap::new(),
            reading_bytes: 0,
            read_count: 0,
            receiver: None,
            is_first_pass: true,
            sync_sent: 0,
            sync_confirmed: 0,
            in_sync: BTreeSet::new(),
        })
    }

    /// Decides what to compare and to send on a new connection.
    pub(super) fn resume(&mut self, accept: &Accept, capabilities: Capabilities) {
        let layout = self.digests.layout();
        let is_accounted = accept.sync == self.sync_sent || accept.sync == self.sync_confirmed;
        if self.receiver == Some(accept.receiver) && is_accounted {
            if accept.sync == self.sync_sent {
                self.confirm_sync(accept.sync);
            }
            // The receiver may have any mixture of these.
            let uncertain: Vec<u64> = self.in_sync.union(self.digests.changed()).copied().collect();
            for unit in uncertain {
                self.digests.set(UnitState { unit, digest: None });
                self.to_compare.insert(unit);
            }
        } else {
            // Nothing is assumed about the receiver. Everything is read from now on, so no mark is needed either.
            self.digests = UnitDigests::new(layout);
            self.later.clear_all();
            self.pending.clear_all();
            self.to_compare = (0..layout.unit_count())
                .filter(|unit| accept.held.contains(*unit))
                .collect();
            (0..layout.unit_count())
                .filter(|unit| !accept.held.contains(*unit))
                .for_each(|unit| self.want(unit));
            self.is_first_pass = true;
        }
        if !capabilities.has(Capabilities::HASHES) {
            for unit in std::mem::take(&mut self.to_compare) {
                self.want(unit);
            }
        }
        // A unit that is sent as a whole must be taken from its start.
        self.cursor = 0;
        self.in_sync.clear();
        self.sync_sent = self.sync_sent.max(accept.sync);
        self.sync_confirmed = accept.sync;
        self.receiver = Some(accept.receiver);
    }

    /// The hash of a unit is sent.
    pub(super) fn compare(&mut self, unit: u64, digest: Digest) {
        self.compared.insert(unit, digest);
    }

    /// Whether an answer about a unit is awaited.
    pub(super) fn is_compared(&self, unit: u64) -> bool {
        self.compared.contains_key(&unit)
    }

    /// The receiver has the content whose hash was sent.
    pub(super) fn is_same(&mut self, unit: u64) {
        let digest = self.compared.remove(&unit);
        self.digests.set(UnitState { unit, digest });
    }

    /// The receiver has another content.
    pub(super) fn differs(&mut self, unit: u64) {
        self.compared.remove(&unit);
        self.digests.set(UnitState { unit, digest: None });
        self.want(unit);
    }

    /// The whole unit is sent.
    fn want(&mut self, unit: u64) {
        self.pending.set(self.digests.layout().bytes_of(unit));
    }

    /// The receiver of the present connection.
    pub(super) fn receiver(&self) -> Option<ReceiverId> {
        self.receiver
    }

    /// The receiver differs from what was sent: assume nothing at the next connection.
    pub(super) fn distrust(&mut self) {
        self.receiver = None;
    }

    /// Reads and hashes that were not answered are asked again on the next connection.
    pub(super) fn disconnect(&mut self) {
        self.reading_bytes = 0;
        for request in std::mem::take(&mut self.reads).into_values() {
            match request.purpose {
                ReadPurpose::Send => self.pending.set(request.range),
                ReadPurpose::Compare(unit) => {
                    self.to_compare.insert(unit);
                }
            }
        }
        self.to_compare.extend(std::mem::take(&mut self.compared).into_keys());
    }

    /// Notes a read that is asked for, and returns its number.
    pub(super) fn read(&mut self, range: Range<u64>, purpose: ReadPurpose) -> u64 {
        self.read_count += 1;
        self.reading_bytes += range.end - range.start;
        self.reads.insert(self.read_count, ReadRequest { range, purpose });
        self.read_count
    }

    /// The read with a number; `None` if it belongs to an earlier connection.
    pub(super) fn complete_read(&mut self, read: u64) -> Option<ReadRequest> {
        let request = self.reads.remove(&read)?;
        self.reading_bytes -= request.range.end - request.range.start;
        Some(request)
    }

    /// Whether reads are in progress.
    pub(super) fn is_reading(&self) -> bool {
        !self.reads.is_empty()
    }

    /// Number of units that are being compared.
    pub(super) fn comparing_count(&self) -> usize {
        self.reads.len() + self.compared.len()
    }

    /// Bytes of reads that are not answered.
    pub(super) fn reading_bytes(&self) -> u64 {
        self.reading_bytes
    }

    /// Takes the next range to send: within one unit.
    pub(super) fn take_pending(&mut self) -> Option<Range<u64>> {
        let layout = self.digests.layout();
        let unit_bytes = u64::from(layout.unit_bytes());
        let taken = self.pending.take_next(self.cursor, unit_bytes);
        let taken = taken.or_else(|| self.pending.take_next(0, unit_bytes))?;
        let unit_end = layout.bytes_of(taken.start / unit_bytes).end;
        if taken.end > unit_end {
            self.pending.set(unit_end..taken.end);
        }
        let range = taken.start..taken.end.min(unit_end);
        self.cursor = range.end;
        Some(range)
    }

    /// Adds marks that belong to the next pass. The caller has taken them from the tracker.
    pub(super) fn add_later(&mut self, mut taken: DirtyBitmap) {
        for range in &self.pending {
            taken.clear(range);
        }
        self.merge_later(&taken);
    }

    fn merge_later(&mut self, taken: &DirtyBitmap) {
        self.later
            .merge(taken)
            .expect("the caller checks the dimensions of the tracker");
    }

    /// Starts a pass with all marks.
    pub(super) fn begin_pass(&mut self, taken: &DirtyBitmap) {
        assert!(
            self.reads.is_empty(),
            "reads of the last pass would be sent in this one"
        );
        self.merge_later(taken);
        self.pending
            .merge(&self.later)
            .expect("both have the dimensions of the disk");
        self.later.clear_all();
        self.cursor = 0;
    }

    pub(super) fn later_bytes(&self) -> u64 {
        self.later.dirty_bytes()
    }

    /// Starts a synchronization at the end of a pass.
    pub(super) fn begin_sync(&mut self) -> u64 {
        self.sync_sent += 1;
        self.in_sync.append(&mut self.digests.take_changed());
        self.sync_sent
    }

    pub(super) fn confirm_sync(&mut self, number: u64) {
        if number == self.sync_sent {
            self.sync_confirmed = number;
            self.in_sync.clear();
        }
    }
}
