//! The index for writers.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex};

use holdfast_block::LruCache;

use crate::error::{Error, Result};
use crate::format::index::segment::{SegmentKeys, SegmentPages};
use crate::format::index::{IndexEntry, Prefix, SegmentReader, prefix_of, write_segment};
use crate::format::pack::{Directory, Location};
use crate::id::{ChunkId, PackId, SegmentId};
use crate::repository::damage_records::KnownIdentity;
use crate::repository::packs::Packs;
use crate::store::{ObjectKind, StoreError};

/// Cache size for decoded index pages.
const PAGE_CACHE_BYTES: usize = 6 << 20;

/// Number of chunks that are kept in memory before they are written to a segment: 4 GiB of disk at 64 KiB per
/// chunk.
const RECENT_COUNT_MAX: usize = 1 << 16;

/// Looks up chunks; adds those of new packs.
pub(crate) struct ChunkIndex {
    packs: Arc<Packs>,
    keys: SegmentKeys,
    segments: Vec<SegmentReader>,
    pages: SegmentPages,
    /// Packs whose chunks may be referenced: they existed when the writer began and are not pending deletion.
    usable: HashSet<PackId>,
    /// Chunks of this writer's packs that are not in a segment yet.
    recent: HashMap<Prefix, (ChunkId, Location, u32)>,
    /// Whether a segment was missing when it was read.
    vanished: bool,
    /// This writer's durable packs that are not in a segment yet.
    finished: Vec<(PackId, Directory)>,
    finished_chunk_count: usize,
    /// Bytes of the segments that were written.
    pub(crate) written_bytes: u64,
}

impl ChunkIndex {
    pub(crate) fn new(
        packs: Arc<Packs>,
        keys: SegmentKeys,
        segments: Vec<SegmentReader>,
        usable: HashSet<PackId>,
    ) -> Self {
        Self {
            packs,
            keys,
            segments,
            pages: Mutex::new(LruCache::new(PAGE_CACHE_BYTES)),
            usable,
            recent: HashMap::new(),
            vanished: false,
            finished: Vec::new(),
            finished_chunk_count: 0,
            written_bytes: 0,
        }
    }

    /// Whether a new snapshot may refer to `pack`.
    pub(crate) fn is_usable(&self, pack: PackId) -> bool {
        self.usable.contains(&pack) && !self.packs.is_flawed(pack)
    }

    /// The location of a chunk, if it is stored in a usable pack.
    pub(crate) fn find(&mut self, id: &ChunkId, length: u32) -> Option<Location> {
        let prefix = prefix_of(id);
        if let Some((known, location, known_length)) = self.recent.get(&prefix)
            && known == id
            && *known_length == length
        {
            return Some(*location);
        }
        self.find_listed(&prefix, length, &|other| other == id)
    }

    /// The location of a chunk of which possibly only the start of the id is known.
    pub(crate) fn find_known(&mut self, identity: &KnownIdentity, length: u32) -> Option<Location> {
        if let Some((known, location, known_length)) = self.recent.get(&identity.prefix())
            && identity.is(known)
            && *known_length == length
            && self.is_usable(location.pack)
        {
            return Some(*location);
        }
        self.find_listed(&identity.prefix(), length, &|other| identity.is(other))
    }

    fn find_listed(&mut self, prefix: &Prefix, length: u32, is_it: &dyn Fn(&ChunkId) -> bool) -> Option<Location> {
        self.find_stored(prefix, length, is_it).or_else(|| {
            // Entries of segments that were merged meanwhile are found in the new segment.
            (self.vanished && self.reload())
                .then(|| self.find_stored(prefix, length, is_it))
                .flatten()
        })
    }

    fn find_stored(&mut self, prefix: &Prefix, length: u32, is_it: &dyn Fn(&ChunkId) -> bool) -> Option<Location> {
        for segment in &self.segments {
            // Chunks in an unreadable segment are not found and are stored again, which costs space but loses
            // nothing.
            let entries = match segment.find(&**self.packs.store(), &self.pages, prefix) {
                Err(Error::Store(StoreError::NotFound { .. })) => {
                    self.vanished = true;
                    continue;
                }
                other => other.unwrap_or_default(),
            };
            if let Some(entry) = entries.iter().find(|entry| self.has_chunk(entry, length, is_it)) {
                return Some(entry.location);
            }
        }
        None
    }

    /// Opens the existing segments; returns false if that fails, and keeps the open ones.
    fn reload(&mut self) -> bool {
        self.vanished = false;
        let store = self.packs.store();
        let mut names = Vec::new();
        let listed = store.list(ObjectKind::Index, &mut |name, _| {
            names.extend(name.name().parse::<SegmentId>());
            Ok(())
        });
        let opened = names
            .iter()
            .filter_map(|id| SegmentReader::open(&**store, &self.keys, *id).ok());
        let segments: Vec<_> = opened.collect();
        if listed.is_err() || segments.is_empty() {
            return false;
        }
        self.segments = segments;
        true
    }

    /// Whether the pack of `entry` is usable and has a chunk there whose complete id `is_it` accepts.
    fn has_chunk(&self, entry: &IndexEntry, length: u32, is_it: &dyn Fn(&ChunkId) -> bool) -> bool {
        let Location { pack, frame, offset } = entry.location;
        if entry.length != length || !self.is_usable(pack) {
            return false;
        }
        let Ok(reader) = self.packs.reader(pack) else {
            return false;
        };
        let Ok(frame) = reader.frame(frame) else { return false };
        let mut at = 0;
        reader.directory.chunks(frame).iter().any(|chunk| {
            let here = at == offset && chunk.length == length && is_it(&chunk.id);
            at += chunk.length;
            here
        })
    }

    /// Records a chunk that was put into this writer's own pack.
    pub(crate) fn remember(&mut self, id: ChunkId, location: Location, length: u32) {
        self.recent.insert(prefix_of(&id), (id, location, length));
    }

    /// Allows references to chunks and pages of this writer's own pack.
    pub(crate) fn add_own_pack(&mut self, pack: PackId) {
        self.usable.insert(pack);
    }

    /// Adds a pack that no segment lists; returns true if a segment should be written.
    pub(crate) fn adopt(&mut self, pack: PackId, directory: &Directory) -> bool {
        for (frame, number) in directory.frames().iter().zip(0u32..) {
            let mut offset = 0;
            for chunk in directory.chunks(frame) {
                self.remember(
                    chunk.id,
                    Location {
                        pack,
                        frame: number,
                        offset,
                    },
                    chunk.length,
                );
                offset += chunk.length;
            }
        }
        self.finish_pack(pack, directory.clone())
    }

    /// Adds the directory of this writer's own pack, which is durable now; returns true if a segment should be
    /// written.
    pub(crate) fn finish_pack(&mut self, pack: PackId, directory: Directory) -> bool {
        self.finished_chunk_count += directory.chunk_count();
        self.finished.push((pack, directory));
        self.finished_chunk_count >= RECENT_COUNT_MAX
    }

    /// Writes a segment about all finished packs, if there are any.
    pub(crate) fn write_segment(&mut self, segment: SegmentId) -> Result<()> {
        if self.finished.is_empty() {
            return Ok(());
        }
        write_segment(&**self.packs.store(), &self.keys, segment, &self.finished)?;
        match SegmentReader::open(&**self.packs.store(), &self.keys, segment) {
            Ok(segment) => {
                self.written_bytes += segment.length;
                self.segments.push(segment);
                let packs: HashSet<PackId> = self.finished.iter().map(|(pack, _)| *pack).collect();
                self.recent
                    .retain(|_, (_, location, _)| !packs.contains(&location.pack));
            }
            // Gc has merged it into another segment already; its entries are still in memory.
            Err(Error::Store(StoreError::NotFound { .. })) => {}
            Err(error) => return Err(error),
        }
        self.finished.clear();
        self.finished_chunk_count = 0;
        Ok(())
    }
}
