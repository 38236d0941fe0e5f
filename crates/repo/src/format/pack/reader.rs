//! Reads a pack: its directory first, then any frame.

use super::directory::{DIRECTORY_BYTES_MAX, Directory, FrameContent, FrameEntry};
use super::key::{PackKey, PackSection};
use super::layout::{
    HEADER_LENGTH, PackKind, TRAILER_LENGTH, correct_trailer, decode_header, decode_trailer, header_pack, pack_name,
};
use crate::error::{Error, Result};
use crate::format::codec::{Decompressor, FrameMemory, StoredFrame};
use crate::id::PackId;
use crate::store::{ObjectName, Store, StoreError};

/// Bytes at the end of a pack that are read together: most directories fit.
const TAIL_BYTES: u64 = 48 << 10;

/// Bytes of the shortest pack: a header and a trailer.
pub(crate) const PACK_BYTES_MIN: u64 = (HEADER_LENGTH + TRAILER_LENGTH) as u64;

/// The state of a pack's directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum DirectoryState {
    /// Intact, as is the trailer.
    Whole,
    /// The directory is intact, but the trailer is damaged.
    TrailerDamaged(DirectoryFlaw),
    /// The directory is lost. The frames are known from the index, their chunks are not.
    Lost(DirectoryFlaw),
}

/// A problem at the end of a pack.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DirectoryFlaw {
    offset: u64,
    detail: String,
}

/// A pack whose directory was read and validated, or whose frames are known from elsewhere.
pub(crate) struct PackReader {
    pub(crate) pack: PackId,
    pub(crate) name: ObjectName,
    pub(crate) length: u64,
    pub(crate) directory: Directory,
    /// The offset of the sealed directory.
    pub(crate) directory_offset: u64,
    /// BLAKE3 of everything before the trailer, according to the trailer.
    pub(crate) hash: [u8; 32],
    pub(crate) state: DirectoryState,
    key: PackKey,
}

/// Reads the directory of `pack`.
pub(crate) fn read_directory(store: &dyn Store, pack: PackId, key: PackKey) -> Result<PackReader> {
    read_directory_at(store, pack_name(pack), pack, key)
}

/// Reads the directory of the bytes under the name of `place`, if they are those of another pack; otherwise `None`.
pub(crate) fn read_displaced_directory(
    store: &dyn Store,
    place: PackId,
    key_of: impl FnOnce(PackId) -> PackKey,
) -> Result<Option<PackReader>> {
    let mut header = [0; HEADER_LENGTH];
    let name = pack_name(place);
    store.get_range(&name, 0, &mut header)?;
    match header_pack(&header).filter(|pack| *pack != place) {
        Some(pack) => read_directory_at(store, name, pack, key_of(pack)).map(Some),
        None => Ok(None),
    }
}

/// Reads the directory of `pack`, whose bytes are stored under `name`.
fn read_directory_at(store: &dyn Store, name: ObjectName, pack: PackId, key: PackKey) -> Result<PackReader> {
    let length = match store.length(&name) {
        Err(StoreError::NotFound { .. }) => return Err(Error::MissingPack { pack }),
        other => other?,
    };
    if length < PACK_BYTES_MIN {
        return Err(Error::damaged(&name, length, "it is too short to be a pack"));
    }
    let mut tail = vec![0; holdfast_block::to_usize(length.min(TAIL_BYTES))];
    store.get_range(&name, length - tail.len() as u64, &mut tail)?;
    let trailer_at = tail.len() - TRAILER_LENGTH;
    let trailer_bytes = tail[trailer_at..].try_into().expect("the tail ends with a trailer");
    let trailer = decode_trailer(&trailer_bytes, pack, length)?;
    let end = DirectoryLocation {
        name: &name,
        tail: &tail[..trailer_at],
        offset: trailer.directory_offset,
        length: trailer.directory_length,
    };
    let directory = end.directory(store, &key)?;
    Ok(PackReader {
        pack,
        name,
        length,
        directory,
        directory_offset: trailer.directory_offset,
        hash: trailer.hash,
        state: DirectoryState::Whole,
        key,
    })
}

/// The location of a pack's directory.
struct DirectoryLocation<'a> {
    name: &'a ObjectName,
    /// The bytes before the trailer that were read with it.
    tail: &'a [u8],
    offset: u64,
    length: u64,
}

impl DirectoryLocation<'_> {
    fn directory(&self, store: &dyn Store, key: &PackKey) -> Result<Directory> {
        if self.length > DIRECTORY_BYTES_MAX {
            let detail = format!(
                "its directory has {} bytes; at most {DIRECTORY_BYTES_MAX} are read",
                self.length
            );
            return Err(Error::damaged(self.name, self.offset, detail));
        }
        let length = holdfast_block::to_usize(self.length);
        let mut sealed = if let Some(start) = self.tail.len().checked_sub(length) {
            self.tail[start..].to_vec()
        } else {
            let mut sealed = vec![0; length];
            store.get_range(self.name, self.offset, &mut sealed)?;
            sealed
        };
        if !key.open(PackSection::Directory, &mut sealed) {
            let detail = "its directory has changed since it was written";
            return Err(Error::damaged(self.name, self.offset, detail));
        }
        Directory::decode(&sealed, self.offset)
            .map_err(|malformed| Error::malformed(self.name, self.offset, "directory", malformed))
    }
}

/// Finds the frames of `pack` in another way if `error` makes its directory or trailer unusable: by correcting a
/// flipped bit in the trailer, or with `table`, the copy in the index. `None` if that is impossible.
pub(crate) fn read_around(
    store: &dyn Store,
    pack: PackId,
    key: PackKey,
    error: &Error,
    table: impl FnOnce() -> Result<Option<Directory>>,
) -> Result<Option<PackReader>> {
    let name = pack_name(pack);
    let length = store.length(&name)?;
    let mut header = [0; HEADER_LENGTH];
    let is_header_read = store.get_range(&name, 0, &mut header).is_ok();
    // The bytes of another pack do not help to read this one.
    if length < PACK_BYTES_MIN || is_header_read && header_pack(&header).is_some_and(|other| other != pack) {
        return Ok(None);
    }
    let flaw = match error {
        Error::Damaged { offset, detail, .. } => DirectoryFlaw {
            offset: *offset,
            detail: detail.clone(),
        },
        other => DirectoryFlaw {
            offset: length,
            detail: format!("its directory cannot be read: {other}"),
        },
    };
    let open_at = |offset: u64| {
        let end = DirectoryLocation {
            name: &name,
            tail: &[],
            offset,
            length: (length - TRAILER_LENGTH as u64).checked_sub(offset)?,
        };
        end.directory(store, &key).ok()
    };
    let mut trailer = [0; TRAILER_LENGTH];
    let is_trailer_read = store
        .get_range(&name, length - TRAILER_LENGTH as u64, &mut trailer)
        .is_ok();
    let corrected = is_trailer_read
        .then(|| correct_trailer(&trailer, pack, length))
        .flatten();
    let found = corrected.and_then(|trailer| Some((open_at(trailer.directory_offset)?, trailer.directory_offset)));
    let (directory, directory_offset, state) = if let Some((directory, offset)) = found {
        (directory, offset, DirectoryState::TrailerDamaged(flaw))
    } else {
        let Some(mut frames) = table()? else { return Ok(None) };
        let offset = frames.finish();
        match open_at(offset) {
            Some(directory) => (directory, offset, DirectoryState::TrailerDamaged(flaw)),
            None => (frames, offset, DirectoryState::Lost(flaw)),
        }
    };
    Ok(Some(PackReader {
        pack,
        name,
        length,
        directory,
        directory_offset,
        hash: [0; 32],
        state,
        key,
    }))
}

/// The kind of content according to the header of `pack`.
pub(crate) fn read_kind(store: &dyn Store, pack: PackId) -> Result<PackKind> {
    let mut header = [0; HEADER_LENGTH];
    match store.get_range(&pack_name(pack), 0, &mut header) {
        Err(StoreError::NotFound { .. }) => Err(Error::MissingPack { pack }),
        Err(error) => Err(error.into()),
        Ok(()) => Ok(decode_header(&header, pack)?.kind),
    }
}

impl PackReader {
    /// The problem of the directory or the trailer.
    pub(crate) fn flaw(&self) -> Option<Error> {
        match &self.state {
            DirectoryState::Whole => None,
            DirectoryState::TrailerDamaged(flaw) | DirectoryState::Lost(flaw) => {
                Some(Error::damaged(&self.name, flaw.offset, flaw.detail.clone()))
            }
        }
    }

    /// Whether the chunks of the frames are known.
    pub(crate) fn has_chunks(&self) -> bool {
        !matches!(self.state, DirectoryState::Lost(_))
    }

    /// The same pack with the chunks of its frames; callers skip frames without chunks.
    pub(crate) fn with_directory(&self, directory: Directory, key: PackKey) -> Self {
        Self {
            pack: self.pack,
            name: self.name.clone(),
            length: self.length,
            directory,
            directory_offset: self.directory_offset,
            hash: self.hash,
            state: match &self.state {
                DirectoryState::Lost(flaw) => DirectoryState::TrailerDamaged(flaw.clone()),
                other => other.clone(),
            },
            key,
        }
    }

    /// The entry of frame `number`; a number that does not exist is damage of the pack or of the reference.
    pub(crate) fn frame(&self, number: u32) -> Result<&FrameEntry> {
        self.directory.frame(number).ok_or_else(|| {
            let detail = format!(
                "frame {number} is referred to; it has {}",
                self.directory.frames().len()
            );
            Error::damaged(&self.name, self.length, detail)
        })
    }

    /// Reads the sealed bytes of frame `number` into `sealed`.
    pub(crate) fn fetch(&self, store: &dyn Store, number: u32, sealed: &mut Vec<u8>) -> Result<()> {
        let frame = self.frame(number)?;
        sealed.resize(frame.stored_length as usize, 0);
        Ok(store.get_range(&self.name, frame.offset, sealed)?)
    }

    /// Opens and decompresses the sealed bytes of frame `number` into `raw`.
    pub(crate) fn unseal(
        &self,
        number: u32,
        sealed: &mut Vec<u8>,
        decompressor: &mut Decompressor,
        raw: &mut dyn FrameMemory,
    ) -> Result<()> {
        let frame = self.open(number, sealed)?;
        let raw = raw.of_length(frame.raw_length as usize);
        decompressor.decompress(&self.stored(frame, sealed), raw)
    }

    /// Like [`unseal`](Self::unseal), but decodes at least the first `wanted` bytes; `raw` becomes as long as the
    /// decoded part.
    pub(crate) fn unseal_start(
        &self,
        number: u32,
        wanted: usize,
        sealed: &mut Vec<u8>,
        decompressor: &mut Decompressor,
        raw: &mut Vec<u8>,
    ) -> Result<()> {
        let frame = self.open(number, sealed)?;
        let raw_length = frame.raw_length as usize;
        let wanted = wanted.min(raw_length);
        decompressor.decompress_start(&self.stored(frame, sealed), raw_length, wanted, raw)
    }

    fn stored<'a>(&'a self, frame: &FrameEntry, bytes: &'a [u8]) -> StoredFrame<'a> {
        StoredFrame {
            codec: frame.codec,
            bytes,
            object: &self.name,
            offset: frame.offset,
        }
    }

    /// Opens the sealed bytes of frame `number` in place.
    fn open(&self, number: u32, sealed: &mut Vec<u8>) -> Result<&FrameEntry> {
        let frame = self.frame(number)?;
        if self.key.open(PackSection::Frame(number), sealed) {
            return Ok(frame);
        }
        let detail = format!("frame {number} has changed since it was written");
        Err(Error::damaged(&self.name, frame.offset, detail))
    }

    /// Reads the prints of the blocks of frame `number`; empty if it contains no blocks.
    pub(crate) fn prints(&self, store: &dyn Store, number: u32) -> Result<Vec<u8>> {
        let frame = self.frame(number)?;
        if frame.content != FrameContent::Blocks {
            return Ok(Vec::new());
        }
        let mut sealed = vec![0; frame.prints_length()];
        store.get_range(&self.name, frame.prints_offset, &mut sealed)?;
        self.unseal_prints(number, &mut sealed)?;
        Ok(sealed)
    }

    /// Opens the sealed prints of frame `number`, which must hold blocks, in place.
    pub(crate) fn unseal_prints(&self, number: u32, sealed: &mut Vec<u8>) -> Result<()> {
        if self.key.open(PackSection::Prints(number), sealed) {
            return Ok(());
        }
        let detail = format!("the prints of frame {number} have changed since they were written");
        Err(Error::damaged(&self.name, self.frame(number)?.prints_offset, detail))
    }

    /// Checks the part that no frame's seal covers: the header.
    pub(crate) fn check_header(&self, header: &[u8; HEADER_LENGTH]) -> Result<()> {
        let header = decode_header(header, self.pack)?;
        if header.kind != self.directory.kind || header.writer != self.directory.writer {
            return Err(Error::damaged(&self.name, 0, "its header and its directory disagree"));
        }
        Ok(())
    }
}
