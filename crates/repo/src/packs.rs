//! The packs of a repository, as every reader sees them: directories, pages, prints and frames, cached within bounds.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::codec::{Decompressor, FrameMemory};
use crate::error::{Error, Result};
use crate::id::PackId;
use crate::key::{Cipher, Keyring, Purpose};
use crate::lru::LruCache;
use crate::map::{PAGE_BYTES_MAX, PageCache, PageRef};
use crate::pack::{Location, PackKey, PackReader, read_directory};
use crate::relocated::{RelocationTables, load_relocations};
use crate::store::{Store, StoreError};

/// Bytes of decoded directories that are kept.
const DIRECTORY_CACHE_BYTES: usize = 4 << 20;
/// Bytes of decoded tree frames that are kept.
const TREE_CACHE_BYTES: usize = 4 << 20;
/// Bytes of prints that are kept.
const PRINT_CACHE_BYTES: usize = 4 << 20;
/// Rewritten packs may have been rewritten again, but not for ever.
const RELOCATION_DEPTH_MAX: u32 = 32;

type FrameKey = (PackId, u32);

/// The buffers that reading frames needs, kept by each thread that reads.
pub(crate) struct FrameBuffers {
    decompressor: Decompressor,
    sealed: Vec<u8>,
}

impl FrameBuffers {
    pub(crate) fn new() -> Self {
        Self {
            decompressor: Decompressor::new(),
            sealed: Vec::new(),
        }
    }
}

/// What came of loading the relocations.
pub(crate) struct Refreshed {
    /// Whether bytes are found in other places than before.
    pub(crate) has_news: bool,
    /// The errors of relocations that cannot be read.
    pub(crate) errors: Vec<Error>,
}

/// The packs of a repository.
pub(crate) struct Packs {
    store: Arc<dyn Store>,
    cipher: Cipher,
    keyring: Keyring,
    directories: Mutex<LruCache<PackId, Arc<PackReader>>>,
    tree_frames: Mutex<LruCache<FrameKey, Arc<Vec<u8>>>>,
    prints: Mutex<LruCache<FrameKey, Arc<Vec<u8>>>>,
    relocations: Mutex<RelocationTables>,
    /// Held while relocations are loaded, so that nobody replaces newer ones by older.
    refreshing: Mutex<()>,
}

/// A cache is only ever replaced as a whole entry, so one whose user panicked is still sound.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Packs {
    pub(crate) fn new(store: Arc<dyn Store>, cipher: Cipher, keyring: Keyring) -> Self {
        Self {
            store,
            cipher,
            keyring,
            directories: Mutex::new(LruCache::new(DIRECTORY_CACHE_BYTES)),
            tree_frames: Mutex::new(LruCache::new(TREE_CACHE_BYTES)),
            prints: Mutex::new(LruCache::new(PRINT_CACHE_BYTES)),
            relocations: Mutex::default(),
            refreshing: Mutex::default(),
        }
    }

    pub(crate) fn store(&self) -> &Arc<dyn Store> {
        &self.store
    }

    pub(crate) fn key(&self, pack: PackId) -> PackKey {
        PackKey::new(self.cipher, self.keyring.key(Purpose::PackSealing), pack)
    }

    /// The pack with its directory; [`Error::MissingPack`] when it does not exist.
    pub(crate) fn reader(&self, pack: PackId) -> Result<Arc<PackReader>> {
        if let Some(reader) = lock(&self.directories).get(&pack) {
            return Ok(reader);
        }
        let read = read_directory(&*self.store, pack, self.key(pack));
        let reader = Arc::new(read.map_err(|error| missing_pack(pack, error))?);
        lock(&self.directories).insert(pack, Arc::clone(&reader), reader.directory.memory_bytes());
        Ok(reader)
    }

    /// Forgets what is cached of a pack.
    pub(crate) fn forget(&self, pack: PackId) {
        lock(&self.directories).remove(&pack);
    }

    /// Takes over the relocations that the repository has now.
    pub(crate) fn refresh(&self) -> Result<Refreshed> {
        let turn = lock(&self.refreshing);
        let (tables, errors) = load_relocations(&*self.store, &self.keyring)?;
        let mut known = lock(&self.relocations);
        let has_news = *known != tables;
        *known = tables;
        drop(known);
        drop(turn);
        Ok(Refreshed { has_news, errors })
    }

    /// Does `read`, and does it again when a pack was missing that gc has rewritten meanwhile.
    ///
    /// Gc says where bytes went before it deletes a pack. So a pack that is still missing when all that has been said is
    /// known, is lost; and if then another is missing, gc has been at work again.
    pub(crate) fn follow<T>(&self, mut read: impl FnMut() -> Result<T>) -> Result<T> {
        let mut missing = None;
        loop {
            match read() {
                Err(Error::MissingPack { pack }) if missing != Some(pack) => {
                    missing = Some(pack);
                    self.refresh()?;
                }
                other => return other,
            }
        }
    }

    /// Where the bytes at `location` are now, and how many of `length` lie there together.
    ///
    /// Parts of packs that were rewritten, or healed, are found through the relocations; all others are where they were.
    pub(crate) fn resolve(&self, location: Location, length: u64) -> Result<(Location, u64)> {
        self.resolve_noting(location, length, |_| ())
    }

    /// The same; calls `hop` with every pack whose relocations were followed.
    pub(crate) fn resolve_noting(
        &self,
        location: Location,
        length: u64,
        mut hop: impl FnMut(PackId),
    ) -> Result<(Location, u64)> {
        let mut place = location;
        let mut together = length;
        for _ in 0..RELOCATION_DEPTH_MAX {
            let table = lock(&self.relocations).get(&place.pack).cloned();
            let Some(table) = table else {
                return Ok((place, together));
            };
            let (moved, length) = table.find(place, together);
            together = length;
            match moved {
                Some(next) => {
                    hop(place.pack);
                    place = next;
                }
                None => return Ok((place, together)),
            }
        }
        Err(Error::MissingPack { pack: place.pack })
    }

    /// The prints of the blocks of a frame, as stored.
    pub(crate) fn prints(&self, pack: PackId, frame: u32) -> Result<Arc<Vec<u8>>> {
        if let Some(prints) = lock(&self.prints).get(&(pack, frame)) {
            return Ok(prints);
        }
        let read = self.reader(pack)?.prints(&*self.store, frame);
        let prints = Arc::new(read.map_err(|error| missing_pack(pack, error))?);
        lock(&self.prints).insert((pack, frame), Arc::clone(&prints), prints.len());
        Ok(prints)
    }

    /// Reads, opens and decompresses a frame into `raw`.
    pub(crate) fn frame(
        &self,
        pack: PackId,
        frame: u32,
        buffers: &mut FrameBuffers,
        raw: &mut dyn FrameMemory,
    ) -> Result<()> {
        let reader = self.fetch(pack, frame, buffers)?;
        reader.unseal(frame, &mut buffers.sealed, &mut buffers.decompressor, raw)
    }

    /// As [`frame`](Self::frame), but at least the first `wanted` bytes only; `raw` gets as long as what was decompressed.
    pub(crate) fn frame_start(
        &self,
        (pack, frame): (PackId, u32),
        wanted: usize,
        buffers: &mut FrameBuffers,
        raw: &mut Vec<u8>,
    ) -> Result<()> {
        let reader = self.fetch(pack, frame, buffers)?;
        reader.unseal_start(frame, wanted, &mut buffers.sealed, &mut buffers.decompressor, raw)
    }

    /// Reads the sealed bytes of a frame.
    fn fetch(&self, pack: PackId, frame: u32, buffers: &mut FrameBuffers) -> Result<Arc<PackReader>> {
        let reader = self.reader(pack)?;
        if let Err(error) = reader.fetch(&*self.store, frame, &mut buffers.sealed) {
            self.forget(pack);
            return Err(missing_pack(pack, error));
        }
        Ok(reader)
    }
}

/// A pack may go between two reads of it.
fn missing_pack(pack: PackId, error: Error) -> Error {
    match error {
        Error::Store(StoreError::NotFound { .. }) => Error::MissingPack { pack },
        other => other,
    }
}

impl PageCache for Packs {
    fn page(&self, page: PageRef) -> Result<Vec<u8>> {
        self.follow(|| self.page_where_it_is(page))
    }
}

impl Packs {
    fn page_where_it_is(&self, page: PageRef) -> Result<Vec<u8>> {
        if page.length as usize > PAGE_BYTES_MAX {
            let detail = format!("a page of {} bytes; at most {PAGE_BYTES_MAX} are read", page.length);
            let name = crate::pack::pack_name(page.location.pack);
            return Err(Error::damaged(&name, page.location.offset.into(), detail));
        }
        let (location, together) = self.resolve(page.location, page.length.into())?;
        let key = (location.pack, location.frame);
        let known = lock(&self.tree_frames).get(&key);
        let frame = if let Some(frame) = known {
            frame
        } else {
            let mut raw = Vec::new();
            self.frame(location.pack, location.frame, &mut FrameBuffers::new(), &mut raw)?;
            raw.shrink_to_fit();
            let frame = Arc::new(raw);
            lock(&self.tree_frames).insert(key, Arc::clone(&frame), frame.len());
            frame
        };
        let start = location.offset as usize;
        match frame.get(start..start + page.length as usize) {
            Some(bytes) if together == u64::from(page.length) => Ok(bytes.to_vec()),
            _ => {
                let detail = format!("a page at {start} of frame {} reaches past its end", location.frame);
                Err(Error::damaged(
                    &crate::pack::pack_name(location.pack),
                    location.offset.into(),
                    detail,
                ))
            }
        }
    }
}
