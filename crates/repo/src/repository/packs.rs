//! The packs of a repository, for readers: directories, pages, prints and frames, in bounded caches.

use std::collections::{BTreeMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use holdfast_block::LruCache;

use crate::error::{Error, Result};
use crate::format::codec::{Decompressor, FrameMemory};
use crate::format::index::{SegmentKeys, find_frame_table};
use crate::format::map::{PAGE_BYTES_MAX, PageCache, PageRef};
use crate::format::pack::{Location, PackKey, PackReader, read_around, read_directory};
use crate::id::PackId;
use crate::key::{Cipher, Keyring, Purpose};
use crate::repository::relocations::{RelocationTables, load_relocations};
use crate::store::{Store, StoreError};

/// Cache size for decoded directories.
const DIRECTORY_CACHE_BYTES: usize = 4 << 20;
/// Cache size for decoded tree frames.
const TREE_CACHE_BYTES: usize = 4 << 20;
/// Cache size for prints.
const PRINT_CACHE_BYTES: usize = 4 << 20;
/// Rewritten packs may be rewritten again; a longer chain is damage.
const RELOCATION_DEPTH_MAX: u32 = 32;

type FrameKey = (PackId, u32);

/// The buffers for reading frames, kept by each reading thread.
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

/// The result of loading the relocations.
pub(crate) struct Refreshed {
    /// Whether any locations have changed.
    pub(crate) has_changes: bool,
    /// The errors of unreadable relocations.
    pub(crate) errors: Vec<Error>,
}

/// Receives warnings about damage that is worked around.
type DamageWarning = Box<dyn Fn(&str) + Send + Sync>;

/// The packs of a repository.
pub(crate) struct Packs {
    store: Arc<dyn Store>,
    cipher: Cipher,
    keyring: Keyring,
    directories: Mutex<LruCache<PackId, Arc<PackReader>>>,
    /// Packs with a damaged directory, whose frames are known from elsewhere.
    flawed: Mutex<LruCache<PackId, Arc<PackReader>>>,
    /// Packs with a damaged directory, whose frames are unknown.
    hopeless: Mutex<HashSet<PackId>>,
    /// The problems of packs that were read with a damaged directory: offset and description.
    flaws: Mutex<BTreeMap<PackId, (u64, String)>>,
    warn: OnceLock<DamageWarning>,
    tree_frames: Mutex<LruCache<FrameKey, Arc<Vec<u8>>>>,
    prints: Mutex<LruCache<FrameKey, Arc<Vec<u8>>>>,
    relocations: Mutex<RelocationTables>,
    /// Held while relocations are loaded, so that newer ones are not replaced by older ones.
    refreshing: Mutex<()>,
}

/// A cache entry is only replaced as a whole, so the cache is consistent even after a panic of another
/// thread.
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
            flawed: Mutex::new(LruCache::new(DIRECTORY_CACHE_BYTES)),
            hopeless: Mutex::default(),
            flaws: Mutex::default(),
            warn: OnceLock::new(),
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

    /// The pack with its directory; [`Error::MissingPack`] if it does not exist.
    pub(crate) fn reader(&self, pack: PackId) -> Result<Arc<PackReader>> {
        if let Some(reader) = lock(&self.directories).get(&pack) {
            return Ok(reader);
        }
        let read = read_directory(&*self.store, pack, self.key(pack));
        let reader = Arc::new(read.map_err(|error| missing_pack(pack, error))?);
        lock(&self.directories).insert(pack, Arc::clone(&reader), reader.directory.memory_bytes());
        Ok(reader)
    }

    /// Like [`reader`](Self::reader), but if the directory is unusable, the frames are taken from elsewhere.
    ///
    /// For callers that find bytes by frame. Callers that look for chunks, or decide what may be referenced, need an
    /// intact directory.
    pub(crate) fn frame_reader(&self, pack: PackId) -> Result<Arc<PackReader>> {
        if let Some(reader) = lock(&self.flawed).get(&pack) {
            return Ok(reader);
        }
        let error = match self.reader(pack) {
            Err(error) if is_about_directory(&error) => error,
            other => return other,
        };
        if lock(&self.hopeless).contains(&pack) {
            return Err(error);
        }
        let keys = SegmentKeys {
            cipher: self.cipher,
            keyring: self.keyring.clone(),
        };
        let table = || find_frame_table(&*self.store, &keys, pack);
        let read = read_around(&*self.store, pack, self.key(pack), &error, table);
        let Some(reader) = read.map_err(|error| missing_pack(pack, error))? else {
            lock(&self.hopeless).insert(pack);
            return Err(error);
        };
        let reader = Arc::new(reader);
        lock(&self.flawed).insert(pack, Arc::clone(&reader), reader.directory.memory_bytes());
        if let Some(Error::Damaged { offset, detail, .. }) = reader.flaw() {
            lock(&self.flaws).insert(pack, (offset, detail));
        }
        if let Some(warn) = self.warn.get() {
            warn(&format!(
                "{error}; its data was found with the copy of its directory in the index"
            ));
        }
        Ok(reader)
    }

    /// Sets the receiver of warnings about damage that is worked around; only the first one is kept.
    pub(crate) fn set_warn(&self, warn: DamageWarning) {
        self.warn.set(warn).ok();
    }

    /// Packs that were read although their directory is damaged, each with the problem.
    pub(crate) fn flaws(&self) -> Vec<(PackId, Error)> {
        let error = |(pack, (offset, detail)): (&PackId, &(u64, String))| {
            let name = crate::format::pack::pack_name(*pack);
            (*pack, Error::damaged(&name, *offset, detail.clone()))
        };
        lock(&self.flaws).iter().map(error).collect()
    }

    /// Whether the pack was read although its directory is damaged.
    pub(crate) fn is_flawed(&self, pack: PackId) -> bool {
        lock(&self.flaws).contains_key(&pack)
    }

    /// Removes the cached data of a pack.
    pub(crate) fn forget(&self, pack: PackId) {
        lock(&self.directories).remove(&pack);
        lock(&self.flawed).remove(&pack);
        lock(&self.hopeless).remove(&pack);
        lock(&self.flaws).remove(&pack);
    }

    /// Loads the present relocations of the repository.
    pub(crate) fn refresh(&self) -> Result<Refreshed> {
        let turn = lock(&self.refreshing);
        let (tables, errors) = load_relocations(&*self.store, &self.keyring)?;
        let mut known = lock(&self.relocations);
        let has_changes = *known != tables;
        *known = tables;
        drop(known);
        drop(turn);
        Ok(Refreshed { has_changes, errors })
    }

    /// Calls `read`, and repeats it if a pack was missing that gc has rewritten meanwhile.
    ///
    /// Gc writes relocations before it deletes a pack. So a pack that is still missing after all relocations are loaded
    /// is lost; if another pack is missing then, gc has continued meanwhile, and the read is repeated.
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

    /// The present location of the bytes at `location`, and how many of `length` bytes are contiguous there.
    ///
    /// Parts of rewritten or healed packs are found through relocations; all other data is at its original location.
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
        let read = self.frame_reader(pack)?.prints(&*self.store, frame);
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

    /// Like [`frame`](Self::frame), but decodes at least the first `wanted` bytes; `raw` becomes as long as the decoded
    /// part.
    pub(crate) fn frame_start(
        &self,
        pack: PackId,
        frame: u32,
        wanted: usize,
        buffers: &mut FrameBuffers,
        raw: &mut Vec<u8>,
    ) -> Result<()> {
        let reader = self.fetch(pack, frame, buffers)?;
        reader.unseal_start(frame, wanted, &mut buffers.sealed, &mut buffers.decompressor, raw)
    }

    /// Reads the sealed bytes of a frame.
    fn fetch(&self, pack: PackId, frame: u32, buffers: &mut FrameBuffers) -> Result<Arc<PackReader>> {
        let reader = self.frame_reader(pack)?;
        if let Err(error) = reader.fetch(&*self.store, frame, &mut buffers.sealed) {
            self.forget(pack);
            return Err(missing_pack(pack, error));
        }
        Ok(reader)
    }
}

/// Whether the directory of an existing pack is unusable.
fn is_about_directory(error: &Error) -> bool {
    !matches!(error, Error::MissingPack { .. }) && (error.is_about_one_object() || error.is_unreadable())
}

/// Maps a missing object to a missing pack: a pack may be deleted between two reads.
fn missing_pack(pack: PackId, error: Error) -> Error {
    match error {
        Error::Store(StoreError::NotFound { .. }) => Error::MissingPack { pack },
        other => other,
    }
}

impl PageCache for Packs {
    fn page(&self, page: PageRef) -> Result<Vec<u8>> {
        self.follow(|| self.read_page(page))
    }
}

impl Packs {
    fn read_page(&self, page: PageRef) -> Result<Vec<u8>> {
        if page.length as usize > PAGE_BYTES_MAX {
            let detail = format!("a page of {} bytes; at most {PAGE_BYTES_MAX} are read", page.length);
            let name = crate::format::pack::pack_name(page.location.pack);
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
                    &crate::format::pack::pack_name(location.pack),
                    location.offset.into(),
                    detail,
                ))
            }
        }
    }
}
