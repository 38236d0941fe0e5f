//! A disk of a snapshot as a block device: opening reads one page, and each read decodes one or two frames.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use holdfast_block::{BlockDevice, Error as DeviceError, ExtentKind, ExtentList, LruCache, to_usize};

use crate::error::{Error, Result};
use crate::format::codec::FRAME_BYTES_MAX;
use crate::format::fingerprint::{BLOCK_LENGTH, FingerprintKeys};
use crate::format::manifest::DiskRecord;
use crate::format::map::{LEAF_BYTES, MapReader, PageRef, Piece, PieceContent, Unit};
use crate::id::{PackId, SnapshotId};
use crate::read::frame_check::{Depth, check_frame};
use crate::repository::Repository;
use crate::repository::packs::{FrameBuffers, Packs};

/// Cache size for decoded frames of an open disk: four of the largest.
const FRAME_CACHE_BYTES: usize = 4 * FRAME_BYTES_MAX;
/// Cache size for decoded leaves of an open disk.
const LEAF_CACHE_BYTES: usize = 4 << 20;

/// Maximum number of frames that one read decodes in parallel.
const FETCH_COUNT_MAX: usize = 2;

/// The pieces of a leaf, each with its offset on the disk; `None` if the leaf is zero.
type LeafPieces = Option<Arc<[(u64, Piece)]>>;

/// Decoded frames, or their starts, by pack and number.
type FrameCache = LruCache<(PackId, u32), Arc<Vec<u8>>>;

/// How much of a frame to decode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum DecodedPart {
    /// All of it, since more of it will be read.
    Whole,
    /// Only the part that is read.
    Start,
}

/// A disk of a snapshot.
pub struct SnapshotDevice {
    packs: Arc<Packs>,
    /// The keys for checking the blocks of every frame against their prints, if requested in addition to the seal.
    print_keys: Option<FingerprintKeys>,
    root: Option<PageRef>,
    size_bytes: u64,
    unit: Unit,
    leaves: Mutex<LruCache<u64, LeafPieces>>,
    frames: Mutex<FrameCache>,
    spare: Mutex<Vec<FrameBuffers>>,
    /// The end of the last read.
    last_end: AtomicU64,
    hit_count: AtomicU64,
    miss_count: AtomicU64,
}

/// Look-ups of frames by reads of a disk since it was opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FrameCacheUse {
    /// Frames that were decoded already.
    pub hit_count: u64,
    /// Frames that had to be read and decoded.
    pub miss_count: u64,
}

impl Repository {
    /// Opens a disk of a snapshot; without a name, the only disk.
    pub fn open_disk(&self, snapshot: SnapshotId, disk: Option<&str>) -> Result<SnapshotDevice> {
        let manifest = self.snapshot(snapshot)?;
        Ok(self.device(manifest.disk(disk)?))
    }

    /// Opens a disk of a snapshot whose manifest was read already.
    pub fn device(&self, disk: &DiskRecord) -> SnapshotDevice {
        SnapshotDevice {
            packs: Arc::clone(&self.packs),
            print_keys: None,
            root: disk.root,
            size_bytes: disk.size_bytes,
            unit: disk.content.unit(),
            leaves: Mutex::new(LruCache::new(LEAF_CACHE_BYTES)),
            frames: Mutex::new(LruCache::new(FRAME_CACHE_BYTES)),
            spare: Mutex::default(),
            last_end: AtomicU64::new(u64::MAX),
            hit_count: AtomicU64::new(0),
            miss_count: AtomicU64::new(0),
        }
    }
}

impl Repository {
    /// The same, but every block is checked against its print, as in [`restore`](Self::restore).
    pub fn device_checking_prints(&self, disk: &DiskRecord) -> SnapshotDevice {
        SnapshotDevice {
            print_keys: Some(self.vault.fingerprint_keys()),
            ..self.device(disk)
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl SnapshotDevice {
    /// How often reads found their data in the cache.
    pub fn cache_use(&self) -> FrameCacheUse {
        FrameCacheUse {
            hit_count: self.hit_count.load(Ordering::Relaxed),
            miss_count: self.miss_count.load(Ordering::Relaxed),
        }
    }

    pub(crate) fn map(&self) -> MapReader<'_> {
        MapReader::new(&*self.packs, self.root, self.size_bytes, self.unit)
    }

    fn leaf(&self, number: u64) -> Result<LeafPieces> {
        if let Some(leaf) = lock(&self.leaves).get(&number) {
            return Ok(leaf);
        }
        let mut start = number * LEAF_BYTES;
        let leaf = self.map().leaf(number)?.map(|pieces| {
            let placed = pieces.into_iter().map(|piece| {
                let at = start;
                start += piece.length;
                (at, piece)
            });
            placed.collect::<Arc<[_]>>()
        });
        let bytes = leaf.as_ref().map_or(0, |pieces| size_of_val(&**pieces)) + 64;
        lock(&self.leaves).insert(number, leaf.clone(), bytes);
        Ok(leaf)
    }

    /// The rest of the piece that contains the byte at `offset`, up to the end of the leaf.
    fn piece_at(&self, offset: u64) -> Result<Piece> {
        let number = offset / LEAF_BYTES;
        let Some(pieces) = self.leaf(number)? else {
            return Ok(Piece {
                length: (number + 1) * LEAF_BYTES - offset,
                content: PieceContent::Zero,
            });
        };
        let at = pieces.partition_point(|(start, _)| *start <= offset) - 1;
        let (start, piece) = pieces[at];
        Ok(piece.part(offset - start, u64::MAX))
    }

    /// The bytes of a frame: at least the first `wanted`, or all if there are fewer.
    ///
    /// The first read of a frame may be the only one, so it decodes only the start. A second read decodes the whole
    /// frame.
    fn frame(&self, pack: PackId, frame: u32, wanted: usize, part: DecodedPart) -> Result<Arc<Vec<u8>>> {
        // Prints cover whole blocks, and a disk may end within a block.
        let wanted = match (&self.print_keys, self.unit) {
            (Some(_), Unit::Block) => wanted.next_multiple_of(BLOCK_LENGTH),
            _ => wanted,
        };
        let known = lock(&self.frames).get(&(pack, frame));
        let part = match known {
            Some(raw) if raw.len() >= wanted => return Ok(raw),
            Some(_) => DecodedPart::Whole,
            // Chunks of a stream are checked as a whole, and do not end at the end of a read.
            None if self.print_keys.is_some() && self.unit == Unit::Byte => DecodedPart::Whole,
            None => part,
        };
        let mut buffers = lock(&self.spare).pop().unwrap_or_else(FrameBuffers::new);
        // Reused memory is cheaper than fresh memory, which the kernel must clear.
        let forgotten = lock(&self.frames).make_room(FRAME_BYTES_MAX);
        let mut raw = forgotten.and_then(Arc::into_inner).unwrap_or_default();
        match part {
            DecodedPart::Whole => self.packs.frame(pack, frame, &mut buffers, &mut raw)?,
            DecodedPart::Start => self.packs.frame_start(pack, frame, wanted, &mut buffers, &mut raw)?,
        }
        lock(&self.spare).push(buffers);
        if let Some(keys) = &self.print_keys {
            let reader = self.packs.frame_reader(pack)?;
            let prints = self.packs.prints(pack, frame)?;
            check_frame(keys, &reader, frame, &raw, &prints, Depth::Prints)?;
        }
        let raw = Arc::new(raw);
        lock(&self.frames).insert((pack, frame), Arc::clone(&raw), raw.capacity());
        Ok(raw)
    }

    /// Decodes the uncached frames that a read of `length` bytes at `offset` needs, in parallel; a read within one
    /// frame starts no thread.
    fn fetch_ahead(&self, offset: u64, length: u64) -> Result<()> {
        let is_next = self.last_end.swap(offset + length, Ordering::Relaxed) == offset;
        let part = if is_next {
            DecodedPart::Whole
        } else {
            DecodedPart::Start
        };
        let mut missing: Vec<((PackId, u32), usize)> = Vec::new();
        let mut at = offset;
        while at < offset + length && missing.len() < FETCH_COUNT_MAX {
            let piece = self.piece_at(at)?.part(0, offset + length - at);
            let mut together = piece.length;
            if let PieceContent::Data(location) = piece.content {
                let (location, resolved) = self.packs.resolve(location, piece.length)?;
                together = resolved;
                let key = (location.pack, location.frame);
                let wanted = location.offset as usize + to_usize(together);
                match missing.iter_mut().find(|(known, _)| *known == key) {
                    Some((_, most)) => *most = wanted.max(*most),
                    None if lock(&self.frames).get(&key).is_some_and(|raw| raw.len() >= wanted) => {
                        self.hit_count.fetch_add(1, Ordering::Relaxed);
                    }
                    None => missing.push((key, wanted)),
                }
            }
            at += together;
        }
        self.miss_count.fetch_add(missing.len() as u64, Ordering::Relaxed);
        let Some((&((pack, frame), wanted), others)) = missing.split_first() else {
            return Ok(());
        };
        // Errors here recur when the bytes are copied, and are reported or handled there.
        std::thread::scope(|scope| {
            for &((pack, frame), wanted) in others {
                scope.spawn(move || self.frame(pack, frame, wanted, part).is_ok());
            }
            self.frame(pack, frame, wanted, part).ok();
        });
        Ok(())
    }

    /// Fills the contiguous part of `buffer`, and returns its length.
    fn read_some(&self, buffer: &mut [u8], offset: u64) -> Result<usize> {
        let piece = self.piece_at(offset)?.part(0, buffer.len() as u64);
        match piece.content {
            PieceContent::Zero => {
                buffer[..to_usize(piece.length)].fill(0);
                Ok(to_usize(piece.length))
            }
            PieceContent::Data(location) => {
                let (location, together, raw) = self.packs.follow(|| {
                    let (location, together) = self.packs.resolve(location, piece.length)?;
                    let wanted = location.offset as usize + to_usize(together);
                    let raw = self.frame(location.pack, location.frame, wanted, DecodedPart::Whole)?;
                    Ok((location, together, raw))
                })?;
                let start = location.offset as usize;
                let length = to_usize(together);
                let Some(bytes) = raw.get(start..start + length) else {
                    let detail = format!("bytes at {start} of frame {} are behind its end", location.frame);
                    return Err(Error::damaged(
                        &crate::format::pack::pack_name(location.pack),
                        location.offset.into(),
                        detail,
                    ));
                };
                buffer[..length].copy_from_slice(bytes);
                Ok(length)
            }
        }
    }

    fn list_extents(&self, range: Range<u64>, extent_count_max: usize) -> Result<ExtentList> {
        let mut list = ExtentList::new(range.start, extent_count_max);
        let mut map = self.map();
        while list.end() < range.end {
            let leaf = list.end() / LEAF_BYTES;
            let next = map.next_leaf(leaf)?;
            if next != Some(leaf) {
                let zero_end = next.map_or(range.end, |next| (next * LEAF_BYTES).min(range.end));
                if !list.push(zero_end - list.end(), ExtentKind::Zero) {
                    break;
                }
                continue;
            }
            let piece = self.piece_at(list.end())?.part(0, range.end - list.end());
            let kind = match piece.content {
                PieceContent::Zero => ExtentKind::Zero,
                PieceContent::Data(_) => ExtentKind::Data,
            };
            if !list.push(piece.length, kind) {
                break;
            }
        }
        Ok(list)
    }
}

impl BlockDevice for SnapshotDevice {
    fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> holdfast_block::Result<()> {
        self.check_bounds(offset, buffer.len() as u64)?;
        self.fetch_ahead(offset, buffer.len() as u64)
            .map_err(DeviceError::layer)?;
        let mut done = 0;
        while done < buffer.len() {
            done += self
                .read_some(&mut buffer[done..], offset + done as u64)
                .map_err(DeviceError::layer)?;
        }
        Ok(())
    }

    fn extents(&self, range: Range<u64>, extent_count_max: usize) -> holdfast_block::Result<ExtentList> {
        self.check_bounds(range.start, range.end.saturating_sub(range.start))?;
        self.list_extents(range, extent_count_max).map_err(DeviceError::layer)
    }

    fn block_size_bytes(&self) -> u32 {
        4096
    }
}
