//! Stores metadata changes, in an order in which a crash causes only leaks.
//!
//! A commit has three parts. [`Qcow2State::begin_commit`] takes the changes, with exclusive access;
//! [`CommitChanges::store`] writes them, without access to the state; [`Qcow2State::end_commit`] frees clusters, again
//! with exclusive access. The image is read and changed during the second part, and those changes belong to the next
//! commit. The store has these steps, with syncs at `|`; the refcounts of freed clusters follow in the third part:
//!
//! ```text
//! data, refcount blocks, new L2 tables | refcount table | L2 tables in place, L1 entries | refcounts of what was freed
//! ```
//!
//! Each step refers only to what an earlier step made durable. After a crash there is the old or the new reference,
//! both to complete structures with sufficient refcounts; at worst, clusters are leaked.

use std::collections::BTreeSet;
use std::sync::Arc;

use holdfast_block::{Result as BlockResult, to_usize};

use super::entry::DataLocation;
use super::geometry::{OFFSET_MASK, POINTER_BYTES};
use super::mapping::L2Table;
use super::refcount_changes::{RefcountChanges, StoreOutcome};
use super::state::Qcow2State;
use crate::file::ImageFile;
use crate::model::bytes::from_words;
use crate::{Error, Result};

/// The files of an image that have data.
#[derive(Clone)]
pub(crate) struct DataFiles {
    file: Arc<dyn ImageFile>,
    external: Option<Arc<dyn ImageFile>>,
}

/// Changes of metadata that are stored together.
pub(crate) struct CommitChanges {
    files: DataFiles,
    refcounts: RefcountChanges,
    tables: Vec<ChangedTable>,
    l1: Vec<L1Entries>,
    changed_l1: BTreeSet<u64>,
    new_tables: BTreeSet<u64>,
    /// Clusters whose refcount is decremented when the removal of their references is durable.
    releases: Vec<u64>,
}

/// An L2 table with changes.
struct ChangedTable {
    /// Of its L1 entry.
    index: u64,
    offset: u64,
    table: Arc<L2Table>,
}

/// Adjacent changed L1 entries.
struct L1Entries {
    offset: u64,
    words: Vec<u64>,
}

/// Why changes were not stored.
pub(crate) struct CommitFailure {
    error: Error,
    step: FailedStep,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum FailedStep {
    /// A write before the first reference to a new table was written.
    BeforeReferences,
    /// A write of references: some of them may be stored.
    References,
    /// A sync: any write since the last one may be lost.
    Sync,
}

impl FailedStep {
    fn failed(self) -> impl Fn(holdfast_block::Error) -> CommitFailure {
        move |error| CommitFailure {
            error: error.into(),
            step: self,
        }
    }
}

impl DataFiles {
    /// Makes all completed writes durable.
    pub(crate) fn sync(&self) -> BlockResult<()> {
        let result = self.file.sync();
        self.external
            .as_ref()
            .map_or(Ok(()), |external| external.sync())
            .and(result)
    }
}

impl CommitChanges {
    /// Stores the changes.
    pub(crate) fn store(&self) -> std::result::Result<(), CommitFailure> {
        let file = &*self.files.file;
        self.refcounts
            .write_blocks(file)
            .and_then(|()| self.write_tables(|table| self.new_tables.contains(&table.index)))
            .map_err(FailedStep::BeforeReferences.failed())?;
        self.files.sync().map_err(FailedStep::Sync.failed())?;
        let table = self.refcounts.write_table(file);
        if table.map_err(FailedStep::BeforeReferences.failed())? == StoreOutcome::Something {
            file.sync().map_err(FailedStep::Sync.failed())?;
        }
        if self.tables.is_empty() && self.l1.is_empty() {
            return Ok(());
        }
        self.write_tables(|table| !self.new_tables.contains(&table.index))
            .and_then(|()| self.write_l1())
            .map_err(FailedStep::References.failed())?;
        file.sync().map_err(FailedStep::Sync.failed())
    }

    fn write_tables(&self, is_wanted: impl Fn(&ChangedTable) -> bool) -> BlockResult<()> {
        let file = &*self.files.file;
        let mut tables = self.tables.iter().filter(|table| is_wanted(table));
        tables.try_for_each(|changed| file.write_at(&from_words(&changed.table), changed.offset))
    }

    fn write_l1(&self) -> BlockResult<()> {
        let file = &*self.files.file;
        let mut entries = self.l1.iter();
        entries.try_for_each(|entries| file.write_at(&from_words(&entries.words), entries.offset))
    }
}

impl Qcow2State {
    /// The files with data.
    pub(crate) fn data_files(&self) -> DataFiles {
        DataFiles {
            file: Arc::clone(&self.layer.file),
            external: (self.place() == DataLocation::External).then(|| Arc::clone(&self.layer.data)),
        }
    }

    /// Takes all changes, to store them without exclusive access. [`end_commit`](Self::end_commit) must follow before
    /// the next call.
    pub(crate) fn begin_commit(&mut self) -> Result<CommitChanges> {
        self.check_health()?;
        let mapping = &mut self.layer.mapping;
        mapping.storing = std::mem::take(&mut mapping.changed);
        let tables = mapping.storing.iter().map(|(index, table)| ChangedTable {
            index: *index,
            offset: mapping.l1[to_usize(*index)] & OFFSET_MASK,
            table: Arc::clone(table),
        });
        let tables = tables.collect();
        let changed_l1 = std::mem::take(&mut self.changed_l1);
        Ok(CommitChanges {
            files: self.data_files(),
            refcounts: self.allocator.take_changes(),
            tables,
            l1: self.l1_entries(&changed_l1),
            changed_l1,
            new_tables: std::mem::take(&mut self.new_tables),
            releases: self.allocator.take_releases(),
        })
    }

    fn l1_entries(&self, changed: &BTreeSet<u64>) -> Vec<L1Entries> {
        let mut entries = Vec::new();
        let mut indexes = changed.iter().copied().peekable();
        while let Some(first) = indexes.next() {
            let mut end = first + 1;
            while indexes.next_if_eq(&end).is_some() {
                end += 1;
            }
            entries.push(L1Entries {
                offset: self.layer.header.l1.offset + first * POINTER_BYTES,
                words: self.layer.mapping.l1[to_usize(first)..to_usize(end)].to_vec(),
            });
        }
        entries
    }

    /// Completes a commit: after a success, frees the released clusters. After a failed write, all changes are pending
    /// again. After a failed sync, the image cannot be written any more.
    pub(crate) fn end_commit(
        &mut self,
        changes: CommitChanges,
        stored: std::result::Result<(), CommitFailure>,
    ) -> Result<()> {
        if let Err(failure) = stored {
            match failure.step {
                FailedStep::Sync => self.poison(&failure.error),
                FailedStep::BeforeReferences | FailedStep::References => self.put_back(changes, failure.step),
            }
            return Err(failure.error);
        }
        self.layer.mapping.storing.clear();
        for changed in changes.tables {
            self.layer.mapping.cache_table(changed.offset, changed.table);
        }
        self.allocator.changes_stored();
        self.free(changes.releases)
    }

    fn put_back(&mut self, changes: CommitChanges, step: FailedStep) {
        let mapping = &mut self.layer.mapping;
        for (index, table) in std::mem::take(&mut mapping.storing) {
            // A table that was changed meanwhile is newer.
            mapping.changed.entry(index).or_insert(table);
        }
        self.changed_l1.extend(changes.changed_l1);
        // If their references may be stored, they must not change before everything that they refer to is durable.
        if step == FailedStep::BeforeReferences {
            self.new_tables.extend(changes.new_tables);
        }
        self.allocator.put_back(changes.refcounts);
        for cluster in changes.releases {
            self.allocator.release_cluster_later(cluster);
        }
    }

    /// Decrements the refcounts of clusters without stored references, and punches those that are free now.
    fn free(&mut self, releases: Vec<u64>) -> Result<()> {
        let freed = self.allocator.apply_releases(releases)?;
        let cluster_bytes = self.geometry().cluster_bytes();
        let mut offsets = freed.into_iter().peekable();
        while let Some(start) = offsets.next() {
            self.layer.mapping.evict(start);
            let mut end = start + cluster_bytes;
            while let Some(next) = offsets.next_if_eq(&end) {
                self.layer.mapping.evict(next);
                end += cluster_bytes;
            }
            self.layer.file.punch(start..end)?;
        }
        // No sync: until the next one, the old refcounts are too high, which is only a leak.
        self.allocator.store_blocks()
    }

    /// Stores everything with exclusive access.
    pub(crate) fn commit(&mut self) -> Result<()> {
        let changes = self.begin_commit()?;
        let stored = changes.store();
        self.end_commit(changes, stored)
    }
}
