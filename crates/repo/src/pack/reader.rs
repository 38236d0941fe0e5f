//! Reading a pack: its directory first, then any frame.

use super::directory::{DIRECTORY_BYTES_MAX, Directory, FrameContent, FrameEntry};
use super::key::{PackKey, Section};
use super::layout::{HEADER_LENGTH, PackKind, TRAILER_LENGTH, decode_header, decode_trailer, header_pack, pack_name};
use crate::codec::{Decompressor, FrameMemory};
use crate::error::{Error, Result};
use crate::id::PackId;
use crate::store::{ObjectName, Store, StoreError};

/// Bytes at the end of a pack that are read at once: most directories fit.
const TAIL_BYTES: u64 = 48 << 10;

/// Bytes of the shortest pack: a header and a trailer.
pub(crate) const PACK_BYTES_MIN: u64 = (HEADER_LENGTH + TRAILER_LENGTH) as u64;

/// A pack whose directory was read and checked.
pub(crate) struct PackReader {
    pub(crate) pack: PackId,
    pub(crate) name: ObjectName,
    pub(crate) length: u64,
    pub(crate) directory: Directory,
    /// Where the sealed directory begins.
    pub(crate) directory_offset: u64,
    /// BLAKE3 of everything before the trailer, as the trailer has it.
    pub(crate) hash: [u8; 32],
    key: PackKey,
}

/// Reads the directory of `pack`.
pub(crate) fn read_directory(store: &dyn Store, pack: PackId, key: PackKey) -> Result<PackReader> {
    read_directory_at(store, pack_name(pack), pack, key)
}

/// Reads the directory of the bytes under the name of `place`, where they are those of another pack; none where they are not.
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

/// Reads the directory of `pack`, whose bytes are under `name`.
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
    if trailer.directory_length > DIRECTORY_BYTES_MAX {
        let detail = format!(
            "its directory has {} bytes; at most {DIRECTORY_BYTES_MAX} are read",
            trailer.directory_length
        );
        return Err(Error::damaged(&name, trailer.directory_offset, detail));
    }
    let directory_length = holdfast_block::to_usize(trailer.directory_length);
    let mut sealed = if directory_length <= trailer_at {
        tail[trailer_at - directory_length..trailer_at].to_vec()
    } else {
        let mut sealed = vec![0; directory_length];
        store.get_range(&name, trailer.directory_offset, &mut sealed)?;
        sealed
    };
    if !key.open(Section::Directory, &mut sealed) {
        return Err(Error::damaged(
            &name,
            trailer.directory_offset,
            "its directory is not what was sealed",
        ));
    }
    let directory = Directory::decode(&sealed, trailer.directory_offset)
        .map_err(|malformed| Error::malformed(&name, trailer.directory_offset, "directory", malformed))?;
    Ok(PackReader {
        pack,
        name,
        length,
        directory,
        directory_offset: trailer.directory_offset,
        hash: trailer.hash,
        key,
    })
}

/// What the header of `pack` says that it holds.
pub(crate) fn read_kind(store: &dyn Store, pack: PackId) -> Result<PackKind> {
    let mut header = [0; HEADER_LENGTH];
    match store.get_range(&pack_name(pack), 0, &mut header) {
        Err(StoreError::NotFound { .. }) => Err(Error::MissingPack { pack }),
        Err(error) => Err(error.into()),
        Ok(()) => Ok(decode_header(&header, pack)?.kind),
    }
}

impl PackReader {
    /// The entry of frame `number`; one that does not exist is damage, of the pack or of what referred to it.
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
        decompressor.decompress(frame.codec, sealed, raw, (&self.name, frame.offset))
    }

    /// As [`unseal`](Self::unseal), but at least the first `wanted` bytes only; `raw` gets as long as what was decompressed.
    pub(crate) fn unseal_start(
        &self,
        number: u32,
        wanted: usize,
        sealed: &mut Vec<u8>,
        decompressor: &mut Decompressor,
        raw: &mut Vec<u8>,
    ) -> Result<()> {
        let frame = self.open(number, sealed)?;
        let memory = raw.of_length(frame.raw_length as usize);
        let wanted = wanted.min(memory.len());
        let filled =
            decompressor.decompress_start(frame.codec, sealed, (memory, wanted), (&self.name, frame.offset))?;
        raw.truncate(filled);
        Ok(())
    }

    /// Opens the sealed bytes of frame `number` in place.
    fn open(&self, number: u32, sealed: &mut Vec<u8>) -> Result<&FrameEntry> {
        let frame = self.frame(number)?;
        if self.key.open(Section::Frame(number), sealed) {
            return Ok(frame);
        }
        let detail = format!("frame {number} is not what was sealed");
        Err(Error::damaged(&self.name, frame.offset, detail))
    }

    /// Reads the prints of the blocks of frame `number`; none where it holds no blocks.
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
        if self.key.open(Section::Prints(number), sealed) {
            return Ok(());
        }
        let detail = format!("the prints of frame {number} are not what was sealed");
        Err(Error::damaged(&self.name, self.frame(number)?.prints_offset, detail))
    }

    /// Checks the parts that no frame's seal covers: the header.
    pub(crate) fn check_header(&self, header: &[u8; HEADER_LENGTH]) -> Result<()> {
        let header = decode_header(header, self.pack)?;
        if header.kind != self.directory.kind || header.writer != self.directory.writer {
            return Err(Error::damaged(&self.name, 0, "its header and its directory disagree"));
        }
        Ok(())
    }
}
