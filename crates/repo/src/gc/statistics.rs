//! Statistics of the repository.

use std::collections::HashSet;

use crate::error::{Error, Result};
use crate::format::manifest::Manifest;
use crate::format::pack::FrameContent;
use crate::gc::loss::LostSearch;
use crate::gc::mark::Marks;
use crate::id::SnapshotId;
use crate::losses::LostSnapshot;
use crate::progress::job::{JobProgress, NoProgress, check_cancelled};
use crate::repository::Repository;
use crate::store::ObjectKind;

/// Statistics of a repository.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Statistics {
    /// Number of snapshots.
    pub snapshot_count: u64,
    /// Bytes of all disks of all snapshots, as plain images.
    pub logical_bytes: u64,
    /// Non-zero bytes of those.
    pub data_bytes: u64,
    /// Uncompressed bytes that all snapshots need together.
    pub unique_bytes: u64,
    /// Bytes of the whole repository in its store.
    pub stored_bytes: u64,
    /// Bytes of chunk packs.
    pub data_pack_bytes: u64,
    /// Bytes of map packs.
    pub tree_pack_bytes: u64,
    /// Bytes of the index.
    pub index_bytes: u64,
    /// Uncompressed bytes that are stored but not needed by any snapshot: approximately what gc can free.
    pub dead_bytes: u64,
    /// Number of stored chunks, needed or not.
    pub chunk_count: u64,
    /// Uncompressed bytes that are stored, needed or not.
    pub raw_bytes: u64,
    /// Number of packs.
    pub pack_count: u64,
    /// Snapshots that are missing without a record of their removal.
    pub lost: Vec<LostSnapshot>,
    /// Each snapshot, oldest first.
    pub snapshots: Vec<SnapshotStatistics>,
}

/// Space of a repository in its store.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StoredSizes {
    /// Bytes of the whole repository.
    pub stored_bytes: u64,
    /// Bytes of the index.
    pub index_bytes: u64,
    /// Number of packs.
    pub pack_count: u64,
}

/// Statistics of a snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SnapshotStatistics {
    /// The snapshot.
    pub id: SnapshotId,
    /// The machine.
    pub machine: String,
    /// The point in time, in milliseconds since 1970-01-01 UTC.
    pub time_ms: i64,
    /// Bytes of all its disks.
    pub logical_bytes: u64,
    /// Non-zero bytes of those.
    pub data_bytes: u64,
    /// Bytes that were new to the repository when it was created.
    pub new_bytes: u64,
    /// Bytes that it added to the repository's packs.
    pub stored_bytes: u64,
}

impl Statistics {
    /// The ratio of the data of all snapshots to the uncompressed stored data.
    pub fn dedup_ratio(&self) -> f64 {
        ratio(self.data_bytes, self.unique_bytes)
    }

    /// The ratio of uncompressed to stored bytes.
    pub fn compression_ratio(&self) -> f64 {
        ratio(self.raw_bytes, self.data_pack_bytes)
    }
}

#[expect(clippy::cast_precision_loss, reason = "a ratio for people has a few digits")]
fn ratio(large: u64, small: u64) -> f64 {
    if small == 0 { 1.0 } else { large as f64 / small as f64 }
}

fn of_snapshot(manifest: &Manifest) -> SnapshotStatistics {
    let found = manifest.statistics();
    SnapshotStatistics {
        id: manifest.id,
        machine: manifest.machine.clone(),
        time_ms: manifest.time_ms,
        logical_bytes: manifest.logical_bytes(),
        data_bytes: found
            .unchanged_bytes
            .saturating_add(found.known_bytes)
            .saturating_add(found.new_bytes),
        new_bytes: found.new_bytes,
        stored_bytes: manifest.stored_bytes,
    }
}

impl Repository {
    /// The space in its store: lists all objects, but reads none.
    pub fn stored_sizes(&self) -> Result<StoredSizes> {
        let mut sizes = StoredSizes::default();
        for kind in ObjectKind::ALL {
            self.vault.store.list(kind, &mut |_, length| {
                sizes.stored_bytes += length;
                match kind {
                    ObjectKind::Index => sizes.index_bytes += length,
                    ObjectKind::Pack => sizes.pack_count += 1,
                    _ => {}
                }
                Ok(())
            })?;
        }
        Ok(sizes)
    }

    /// Measures the repository: reads all maps and the directories of all packs.
    pub fn statistics(&self) -> Result<Statistics> {
        self.statistics_with_progress(&NoProgress::default())
    }

    /// [`statistics`](Self::statistics) with progress and cancellation.
    pub fn statistics_with_progress(&self, progress: &dyn JobProgress) -> Result<Statistics> {
        self.with_all_snapshots(|manifests| self.measure(manifests, progress))
    }

    /// Calls `look` with all snapshots; repeats it if packs were missing because snapshots were forgotten meanwhile.
    pub(crate) fn with_all_snapshots<T>(&self, mut look: impl FnMut(&[Manifest]) -> Result<T>) -> Result<T> {
        loop {
            self.refresh()?;
            let manifests = self.all_snapshots()?;
            let result = look(&manifests);
            if !matches!(result, Err(Error::MissingPack { .. })) {
                return result;
            }
            let now: HashSet<SnapshotId> = self.all_snapshots()?.iter().map(|manifest| manifest.id).collect();
            if manifests.iter().all(|manifest| now.contains(&manifest.id)) {
                return result;
            }
        }
    }

    fn measure(&self, manifests: &[Manifest], progress: &dyn JobProgress) -> Result<Statistics> {
        let mut marks = Marks::default();
        let mut statistics = Statistics {
            snapshot_count: manifests.len() as u64,
            ..Statistics::default()
        };
        progress.items("looking what snapshots need", manifests.len() as u64);
        for manifest in manifests {
            check_cancelled(progress)?;
            progress.advance(1);
            marks.snapshot(&self.packs, manifest)?;
            let snapshot = of_snapshot(manifest);
            statistics.logical_bytes = statistics.logical_bytes.saturating_add(snapshot.logical_bytes);
            statistics.data_bytes = statistics.data_bytes.saturating_add(snapshot.data_bytes);
            statistics.snapshots.push(snapshot);
        }
        let stored = self.stored_sizes()?;
        statistics.stored_bytes = stored.stored_bytes;
        statistics.index_bytes = stored.index_bytes;
        let sizes = self.pack_sizes()?;
        progress.items("looking into packs", sizes.len() as u64);
        for (pack, length) in sizes {
            check_cancelled(progress)?;
            progress.advance(1);
            let reader = match self.packs.frame_reader(pack) {
                // Gc deleted it meanwhile.
                Err(Error::MissingPack { .. }) => continue,
                other => other?,
            };
            statistics.pack_count += 1;
            for (frame, number) in reader.directory.frames().iter().zip(0..) {
                if frame.content == FrameContent::Tree {
                    continue;
                }
                let alive = marks
                    .pack(pack)
                    .map_or(0, |live| live.live_bytes(number, frame.raw_length));
                statistics.unique_bytes += alive;
                statistics.dead_bytes += u64::from(frame.raw_length) - alive;
                statistics.raw_bytes += u64::from(frame.raw_length);
            }
            statistics.chunk_count += reader.directory.chunk_count() as u64;
            match reader.directory.kind {
                crate::format::pack::PackKind::Data => statistics.data_pack_bytes += length,
                crate::format::pack::PackKind::Tree => statistics.tree_pack_bytes += length,
            }
        }
        statistics.lost = self.lost_snapshots(manifests, LostSearch::Thorough)?;
        Ok(statistics)
    }
}
