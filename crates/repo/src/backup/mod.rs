//! Backup: from devices to a committed snapshot.
//!
//! 1. The writer announces itself, so that gc knows about packs without any references yet.
//! 2. It loads the state of the repository: packs that exist and are not pending deletion, the index, the parent.
//! 3. Each disk is read in windows. Every block is classified: zero, unchanged since the parent, stored elsewhere in
//!    the repository, or new. New blocks fill frames, frames fill packs ([`disk`], [`stream`]).
//! 4. When all packs are durable, a segment of the index about them is made durable; then the snapshot is put under the
//!    name that the writer announced. That put is the commit.
//! 5. The writer removes its announcement.
//!
//! A writer that dies before the commit leaves packs that the next backup of the same data reuses, or gc deletes.

mod commit;
pub(crate) mod copy_memory;
mod disk;
mod from_repository;
mod parent;
mod request;
mod stream;
mod survey;
mod windows;

use std::cell::Cell;
use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use holdfast_block::BlockDevice;

use crate::error::{Error, Result};
use crate::format::fingerprint::FingerprintKeys;
use crate::format::index::SegmentReader;
use crate::format::manifest::{DiskContent, DiskRecord, DiskStatistics, Manifest};
use crate::format::map::{PageRef, PageSink};
use crate::format::pack::{ChunkEntry, FrameContent, Location};
use crate::gc::compact::{Compaction, compact_index};
use crate::id::{PackId, SegmentId, SnapshotId};
use crate::packing::{FinishedPack, FrameStream, PackOutput};
use crate::progress::stage::{Stage, timed};
use crate::repository::Repository;
use crate::repository::chunk_index::ChunkIndex;
use crate::repository::damage_records::damaged_packs;
use crate::repository::packs::Packs;
use crate::repository::pending_deletes::condemned_packs;
use crate::writers::lease::{Lease, Work};
pub use copy_memory::CopyMemory;
use parent::ParentMap;
use request::newest_before;
pub use request::{BackupProgress, BackupReport, BackupRequest, Parent, Source, SourceData, StoredDisk};
pub use survey::{CopySurvey, Surveyor};

/// The state of the repository as a backup sees it.
struct RepositoryView {
    index: ChunkIndex,
    parent: Option<Manifest>,
}

impl Repository {
    /// Backs up disks of one machine as one snapshot.
    pub fn backup(&self, request: BackupRequest<'_>, progress: &dyn BackupProgress) -> Result<BackupReport> {
        let snapshot = SnapshotId::from_bytes(self.vault.environment.draw()?);
        let lease = Lease::take(&self.vault, Work::Backup, Some(snapshot))?;
        let tree_pack = Cell::new(None);
        let result = self.backup_under(&lease, snapshot, &tree_pack, request, progress);
        if result.is_ok() {
            // The snapshot is committed, even if the healing of other snapshots fails.
            match self.heal(&lease) {
                Ok(0) => {}
                Ok(bytes) => progress.note(format!(
                    "{bytes} bytes that damaged packs had lost are back for all snapshots"
                )),
                Err(error) => progress.warn(format!("damage of earlier snapshots was not healed: {error}")),
            }
        }
        match &result {
            // The writer's data has no references and will get none, so gc need not wait for it.
            Err(_) => {
                if self.close_unfinished(&lease, snapshot, tree_pack.get()) {
                    drop(lease.release());
                }
            }
            // The snapshot is committed, even if a later step fails.
            Ok(_) => {
                if let Err(error) = lease.release() {
                    progress.warn(format!("{error}; gc waits for this process to end"));
                }
            }
        }
        result
    }

    /// Backs up under a lease. `tree_pack` is set to the pack that gets the copy of the manifest, even if the backup fails.
    fn backup_under(
        &self,
        lease: &Lease<'_>,
        snapshot: SnapshotId,
        tree_pack: &Cell<Option<PackId>>,
        mut request: BackupRequest<'_>,
        progress: &dyn BackupProgress,
    ) -> Result<BackupReport> {
        let view = self.view(&request, progress)?;
        let draw = RandomIds(self);
        let draw_pack = || draw.pack();
        let (manifest, statistics, mut stored_bytes, pack_count) = std::thread::scope(|scope| {
            let store = Arc::clone(&self.vault.store);
            let frames = |content| FrameStream::new(Arc::clone(&self.packs), &draw_pack, content);
            let mut session = Session {
                packs: Arc::clone(&self.packs),
                keys: self.vault.fingerprint_keys(),
                index: view.index,
                output: PackOutput::new(
                    scope,
                    store,
                    progress.timer(),
                    lease.record.writer,
                    request.thread_count,
                ),
                data: frames(FrameContent::Blocks),
                stream: frames(FrameContent::Stream),
                tree: frames(FrameContent::Tree),
                thread_count: request.thread_count,
                progress,
                draw: &draw,
                lease,
                found: DiskStatistics::default(),
                stored_bytes: 0,
                pack_count: 0,
            };
            tree_pack.set(Some(session.tree.pack()));
            let disks = session.disks(&mut request.sources, view.parent.as_ref())?;
            tree_pack.set(Some(session.tree.pack()));
            let mut manifest = Manifest::new(snapshot, request.machine, request.time_ms, session.tree.pack());
            manifest.tags = request.tags;
            manifest.parent = view.parent.map(|parent| parent.id);
            manifest.host = request.host;
            manifest.program = request.program;
            manifest.notes = request.notes;
            manifest.disks = disks;
            session.finish_data()?;
            manifest.stored_bytes = session.stored_bytes;
            session.finish_tree(&manifest)?;
            Ok::<_, Error>((manifest, session.found, session.stored_bytes, session.pack_count))
        })?;
        stored_bytes += timed(progress.timer(), Stage::AwaitDurable, || self.commit(lease, &manifest))?;
        if let Err(error) = compact_index(&self.vault, Compaction::Small) {
            progress.warn(format!("the index was not made shorter: {error}"));
        }
        Ok(BackupReport {
            snapshot: manifest,
            statistics,
            stored_bytes,
            pack_count,
        })
    }

    /// Loads the state of the repository. The writer must have announced itself already.
    fn view(&self, request: &BackupRequest<'_>, progress: &dyn BackupProgress) -> Result<RepositoryView> {
        self.refresh()?;
        let index = self.usable_index(&mut |warning| progress.warn(warning))?;
        Ok(RepositoryView {
            index,
            parent: self.parent(request, progress)?,
        })
    }

    /// The index of everything that a new snapshot may refer to. The caller must have announced itself
    /// already.
    pub(crate) fn usable_index(&self, warn: &mut dyn FnMut(String)) -> Result<ChunkIndex> {
        // The order matters: a pack that is condemned after this read is not deleted before this backup ends.
        let condemned = condemned_packs(&self.vault)?;
        let damaged = damaged_packs(&self.vault)?;
        let mut usable = self.vault.pack_ids()?;
        usable.retain(|pack| !condemned.contains(pack) && !damaged.contains(pack));
        let (segments, errors) = self.vault.segments()?;
        for error in errors {
            warn(format!("{error}; what it lists may be stored again"));
        }
        let covered: HashSet<PackId> = segments.iter().flat_map(SegmentReader::packs).copied().collect();
        let mut index = ChunkIndex::new(
            Arc::clone(&self.packs),
            self.vault.segment_keys(),
            segments,
            usable.clone(),
        );
        let mut unlisted: Vec<_> = usable.difference(&covered).collect();
        unlisted.sort_unstable();
        for pack in unlisted {
            // The pack belongs to an interrupted or a concurrent backup.
            match self.packs.reader(*pack) {
                Ok(reader) => {
                    if index.adopt(*pack, &reader.directory) {
                        index.write_segment(RandomIds(self).segment())?;
                    }
                }
                Err(error) if error.is_about_one_object() => warn(format!("{error}; it is not used")),
                Err(error) => return Err(error),
            }
        }
        Ok(index)
    }

    fn parent(&self, request: &BackupRequest<'_>, progress: &dyn BackupProgress) -> Result<Option<Manifest>> {
        match request.parent {
            Parent::None => Ok(None),
            Parent::Named(id) => self.snapshot(id).map(Some),
            Parent::Newest => {
                let (snapshots, errors) = self.snapshots()?;
                for error in errors {
                    progress.warn(error.to_string());
                }
                let of_machine = snapshots.into_iter().filter(|one| one.machine == request.machine);
                Ok(newest_before(of_machine.collect(), self.now_ms().max(request.time_ms)))
            }
        }
    }
}

/// Draws random ids; a failing source of randomness is detected when the backup starts.
struct RandomIds<'a>(&'a Repository);

impl RandomIds<'_> {
    fn bytes(&self) -> [u8; 16] {
        self.0
            .vault
            .environment
            .draw()
            .expect("the source of randomness worked when the backup started")
    }

    fn pack(&self) -> PackId {
        PackId::from_bytes(self.bytes())
    }

    fn segment(&self) -> SegmentId {
        SegmentId::from_bytes(self.bytes())
    }
}

/// A running backup.
pub(crate) struct Session<'a> {
    packs: Arc<Packs>,
    keys: FingerprintKeys,
    index: ChunkIndex,
    output: PackOutput<'a>,
    /// Chunks of disks, chunks of streams, and pages of maps: never in one frame.
    data: FrameStream<'a>,
    stream: FrameStream<'a>,
    tree: FrameStream<'a>,
    thread_count: usize,
    progress: &'a dyn BackupProgress,
    draw: &'a RandomIds<'a>,
    lease: &'a Lease<'a>,
    /// Statistics of all disks so far.
    found: DiskStatistics,
    stored_bytes: u64,
    pack_count: u64,
}

impl<'a> Session<'a> {
    fn disks(&mut self, sources: &mut [Source<'_>], parent: Option<&Manifest>) -> Result<Vec<DiskRecord>> {
        let source_count = sources.len();
        sources
            .iter_mut()
            .map(|source| {
                let parent = parent.and_then(|parent| parent_disk(parent, source, source_count));
                self.disk(source, parent)
            })
            .collect()
    }

    fn disk(&mut self, source: &mut Source<'_>, parent: Option<ParentMap>) -> Result<DiskRecord> {
        let (root, size_bytes, content, statistics) = match &mut source.data {
            SourceData::Disk(_) | SourceData::Changes { .. } => {
                let (device, changed): (&dyn BlockDevice, _) = match &source.data {
                    SourceData::Disk(device) => (*device, None),
                    // Without a parent, "clean" has no meaning.
                    SourceData::Changes { device, changed } => (*device, parent.is_some().then_some(*changed)),
                    SourceData::Stream(_) | SourceData::Stored(_) => unreachable!("the arm is for devices"),
                };
                let disk = disk::back_up_disk(self, &source.name, device, changed, parent)?;
                if disk.unreadable_count > 0 {
                    let message = "parts of the parent snapshot cannot be read; they were backed up as if all new";
                    self.progress
                        .warn(format!("disk {}: {message} (run verify)", source.name));
                }
                (disk.root, device.size_bytes(), DiskContent::Blocks, disk.statistics)
            }
            SourceData::Stream(stream) => {
                let stream = stream::back_up_stream(self, &source.name, *stream, parent)?;
                (stream.root, stream.size_bytes, DiskContent::Stream, stream.statistics)
            }
            SourceData::Stored(stored) => {
                let (root, found) = from_repository::copy_disk(self, &source.name, *stored, parent)?;
                self.found += found;
                let DiskRecord {
                    size_bytes, content, ..
                } = *stored.disk;
                (root, size_bytes, content, stored.disk.statistics)
            }
        };
        if !matches!(source.data, SourceData::Stored(_)) {
            self.found += statistics;
        }
        let (name, notes) = (source.name.clone(), std::mem::take(&mut source.notes));
        Ok(DiskRecord {
            name,
            size_bytes,
            content,
            root,
            statistics,
            notes,
        })
    }

    /// Stores the current chunk of `data` if the repository does not have it; returns its location.
    fn store_chunk(&mut self, entry: ChunkEntry, statistics: &mut DiskStatistics) -> Result<Location> {
        let location = deduplicate(&mut self.data, &mut self.index, entry, statistics);
        self.collect()?;
        Ok(location)
    }

    /// The same for the current chunk of `stream`.
    fn store_stream_chunk(&mut self, entry: ChunkEntry, statistics: &mut DiskStatistics) -> Result<Location> {
        let location = deduplicate(&mut self.stream, &mut self.index, entry, statistics);
        self.collect()?;
        Ok(location)
    }

    /// Adds packs that have become durable to the index.
    fn collect(&mut self) -> Result<()> {
        let finished = self.output.finished()?;
        self.take_in(finished)
    }

    fn take_in(&mut self, finished: Vec<FinishedPack>) -> Result<()> {
        for pack in finished {
            self.stored_bytes += pack.stored_bytes;
            self.pack_count += 1;
            if self.index.finish_pack(pack.pack, pack.directory) {
                self.index.write_segment(self.draw.segment())?;
            }
        }
        Ok(())
    }

    /// Makes all chunks durable.
    fn finish_data(&mut self) -> Result<()> {
        self.data.finish(&mut self.output, Vec::new())?;
        self.stream.finish(&mut self.output, Vec::new())?;
        // The pack of map pages is still open and must not be waited for.
        let finished = self.output.wait_for_ended()?;
        self.take_in(finished)
    }

    /// Makes the maps durable, with a copy of the manifest, and the index of all packs.
    fn finish_tree(&mut self, manifest: &Manifest) -> Result<()> {
        self.tree.finish(&mut self.output, manifest.encode())?;
        let finished = self.output.wait_for_ended()?;
        self.take_in(finished)?;
        let (index, segment) = (&mut self.index, self.draw.segment());
        timed(self.progress.timer(), Stage::AwaitDurable, || {
            index.write_segment(segment)
        })?;
        self.stored_bytes += self.index.written_bytes;
        Ok(())
    }

    fn page_sink(&mut self) -> TreeSink<'_, 'a> {
        TreeSink {
            tree: &mut self.tree,
            output: &mut self.output,
            index: &mut self.index,
        }
    }

    fn advance(&self, bytes: u64) {
        self.progress.advance(bytes);
    }

    fn check_cancelled(&self) -> Result<()> {
        self.lease.renew()?;
        if self.progress.cancelled().load(Ordering::Relaxed) {
            Err(Error::Cancelled)
        } else {
            Ok(())
        }
    }
}

/// Keeps the current chunk of `frames` if the repository does not have it, otherwise drops it; returns its location.
fn deduplicate(
    frames: &mut FrameStream<'_>,
    index: &mut ChunkIndex,
    entry: ChunkEntry,
    statistics: &mut DiskStatistics,
) -> Location {
    if let Some(location) = index.find(&entry.id, entry.length) {
        frames.drop_pending();
        statistics.known_bytes += u64::from(entry.length);
        return location;
    }
    let location = frames.keep_pending(entry);
    index.add_own_pack(location.pack);
    index.remember(entry.id, location, entry.length);
    statistics.new_bytes += u64::from(entry.length);
    location
}

/// The parent's disk to compare `source` with: the one with the same name, or the only one if both have only one.
fn parent_disk(parent: &Manifest, source: &Source<'_>, source_count: usize) -> Option<ParentMap> {
    let content = match &source.data {
        SourceData::Disk(_) | SourceData::Changes { .. } => DiskContent::Blocks,
        SourceData::Stream(_) => DiskContent::Stream,
        SourceData::Stored(stored) => stored.disk.content,
    };
    let named = parent.disks.iter().find(|disk| disk.name == source.name);
    let only = match &parent.disks[..] {
        [only] if source_count == 1 => Some(only),
        _ => None,
    };
    named
        .or(only)
        .filter(|disk| disk.content == content)
        .map(|disk| ParentMap {
            root: disk.root,
            size_bytes: disk.size_bytes,
        })
}

/// Stores the pages of a map in frames for pages.
struct TreeSink<'a, 'frames> {
    tree: &'a mut FrameStream<'frames>,
    output: &'a mut PackOutput<'frames>,
    index: &'a mut ChunkIndex,
}

impl PageSink for TreeSink<'_, '_> {
    fn put_page(&mut self, bytes: &[u8]) -> Result<PageRef> {
        let location = self.tree.push_page(bytes, self.output)?;
        self.index.add_own_pack(location.pack);
        let length = u32::try_from(bytes.len()).expect("a page is far smaller than 4 GiB");
        Ok(PageRef { location, length })
    }

    fn is_usable(&self, pack: PackId) -> bool {
        self.index.is_usable(pack)
    }
}
