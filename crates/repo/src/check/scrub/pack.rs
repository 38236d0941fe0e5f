//! Reads one pack sequentially, once.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::check::finding::{FindingKind, classify};
use crate::error::{Error, Result};
use crate::format::codec::Decompressor;
use crate::format::fingerprint::FingerprintKeys;
use crate::format::pack::{FrameContent, HEADER_LENGTH, PackReader, read_directory};
use crate::id::PackId;
use crate::read::frame_check::{Depth, check_frame};
use crate::repository::damage_records::{DamageExtent, DamageRecord};
use crate::repository::packs::Packs;
use crate::store::{Store, StoreError};

/// Memory that a worker reuses.
pub(crate) struct PackScratch {
    decompressor: Decompressor,
    sealed: Vec<u8>,
    raw: Vec<u8>,
}

impl PackScratch {
    pub(crate) fn new() -> Self {
        Self {
            decompressor: Decompressor::new(),
            sealed: Vec::new(),
            raw: Vec::new(),
        }
    }
}

/// The result of reading a pack.
pub(crate) struct PackOutcome {
    pub(crate) pack: PackId,
    /// Its frames, if known.
    pub(crate) reader: Option<Arc<PackReader>>,
    /// The problems: of a frame, or of the pack as a whole.
    pub(crate) errors: Vec<(Option<u32>, Error)>,
    /// Parts that must not be read: their state is unknown.
    pub(crate) refused: Vec<Error>,
    /// It was deleted meanwhile and needs no check.
    pub(crate) is_gone: bool,
}

impl PackOutcome {
    /// The damage that later backups must know about; `None` if the pack is intact, or may be once the store is
    /// readable again.
    pub(crate) fn damage(&self) -> Option<DamageRecord> {
        if self.errors.is_empty() {
            return None;
        }
        let Some(reader) = &self.reader else {
            return Some(DamageRecord::new(DamageExtent::Whole));
        };
        let frames: BTreeSet<u32> = self.errors.iter().filter_map(|(frame, _)| *frame).collect();
        let mut record = DamageRecord::new(DamageExtent::Frames(frames));
        record.add_directory(&reader.directory);
        Some(record)
    }
}

/// Reads all of `pack` and checks everything that needs no other object.
///
/// Errors of the store that do not concern this pack are returned.
pub(crate) fn scrub_pack(
    packs: &Packs,
    keys: &FingerprintKeys,
    pack: PackId,
    scratch: &mut PackScratch,
) -> Result<PackOutcome> {
    let store = Arc::clone(packs.store());
    let mut outcome = PackOutcome {
        pack,
        reader: None,
        errors: Vec::new(),
        refused: Vec::new(),
        is_gone: false,
    };
    let reader = match read_directory(&*store, pack, packs.key(pack)) {
        Ok(reader) => Arc::new(reader),
        // It was deleted since it was listed, or between two reads of its directory.
        Err(Error::MissingPack { .. } | Error::Store(StoreError::NotFound { .. })) => {
            outcome.is_gone = true;
            return Ok(outcome);
        }
        Err(error) => {
            let is_refused = matches!(error, Error::Store(StoreError::Permission { .. }));
            outcome.note(None, error)?;
            if is_refused {
                return Ok(outcome);
            }
            // Its frames may be known from the index; then they are worth reading.
            packs.forget(pack);
            match packs.frame_reader(pack) {
                Ok(reader) => reader,
                Err(_) => return Ok(outcome),
            }
        }
    };
    match read_sections(&*store, keys, &reader, scratch, &mut outcome) {
        // Deleted while it was read.
        Err(Error::Store(StoreError::NotFound { .. })) => {
            outcome.is_gone = true;
            outcome.errors.clear();
        }
        other => other?,
    }
    outcome.reader = Some(reader);
    Ok(outcome)
}

impl PackOutcome {
    /// Adds an error about the pack; returns any other error.
    fn note(&mut self, frame: Option<u32>, error: Error) -> Result<()> {
        if matches!(error, Error::Store(StoreError::NotFound { .. })) {
            return Err(error);
        }
        if matches!(error, Error::Store(StoreError::Permission { .. })) {
            self.refused.push(error);
            return Ok(());
        }
        let (object, offset, kind, detail) = classify(error)?;
        let name = object.unwrap_or_else(|| crate::format::pack::pack_name(self.pack));
        let error = match kind {
            FindingKind::LaterVersion => Error::damaged(&name, 0, detail),
            _ => Error::damaged(&name, offset.unwrap_or_default(), detail),
        };
        self.errors.push((frame, error));
        Ok(())
    }
}

fn read_sections(
    store: &dyn Store,
    keys: &FingerprintKeys,
    reader: &PackReader,
    scratch: &mut PackScratch,
    outcome: &mut PackOutcome,
) -> Result<()> {
    let mut hasher = blake3::Hasher::new();
    let mut is_read = true;
    let mut header = [0; HEADER_LENGTH];
    match store.get_range(&reader.name, 0, &mut header) {
        Ok(()) => {
            hasher.update(&header);
            if let Err(error) = reader.check_header(&header) {
                outcome.note(None, error)?;
            }
        }
        Err(error) => {
            is_read = false;
            outcome.note(None, error.into())?;
        }
    }
    let prints_start = reader.directory.frames_end();
    let prints_length = holdfast_block::to_usize(reader.directory_offset - prints_start);
    // At most 12 bytes per block: a few hundred KiB.
    let mut prints = vec![0; prints_length];
    let mut prints_read = true;
    if let Err(error) = store.get_range(&reader.name, prints_start, &mut prints) {
        (is_read, prints_read) = (false, false);
        outcome.note(None, error.into())?;
    }
    for number in 0..u32::try_from(reader.directory.frames().len()).expect("a pack has at most 2^16 frames") {
        match reader.fetch(store, number, &mut scratch.sealed) {
            Ok(()) => {
                hasher.update(&scratch.sealed);
            }
            Err(error) => {
                is_read = false;
                outcome.note(Some(number), error)?;
                continue;
            }
        }
        let section = prints_read.then_some((&prints[..], prints_start));
        if let Err(error) = check_sections(keys, reader, number, section, scratch) {
            outcome.note(Some(number), error)?;
        }
    }
    hasher.update(&prints);
    if reader.flaw().is_some() {
        return Ok(());
    }
    let directory_length =
        holdfast_block::to_usize(reader.length - reader.directory_offset) - crate::format::pack::TRAILER_LENGTH;
    scratch.sealed.resize(directory_length, 0);
    store.get_range(&reader.name, reader.directory_offset, &mut scratch.sealed)?;
    hasher.update(&scratch.sealed);
    if is_read
        && outcome.errors.is_empty()
        && outcome.refused.is_empty()
        && *hasher.finalize().as_bytes() != reader.hash
    {
        let detail = "every section is as it was sealed, but the hash in its trailer is another";
        outcome.note(None, Error::damaged(&reader.name, reader.length, detail))?;
    }
    Ok(())
}

/// Checks a frame whose sealed bytes were read, together with its prints out of the prints of the pack.
fn check_sections(
    keys: &FingerprintKeys,
    reader: &PackReader,
    number: u32,
    prints: Option<(&[u8], u64)>,
    scratch: &mut PackScratch,
) -> Result<()> {
    let PackScratch {
        decompressor,
        sealed,
        raw,
    } = scratch;
    reader.unseal(number, sealed, decompressor, raw)?;
    let frame = reader.frame(number)?;
    let mut own = Vec::new();
    if frame.content == FrameContent::Blocks {
        let Some((prints, start)) = prints else {
            let detail = format!("the prints of frame {number} cannot be read");
            return Err(Error::damaged(&reader.name, frame.prints_offset, detail));
        };
        let at = holdfast_block::to_usize(frame.prints_offset - start);
        own.extend_from_slice(&prints[at..at + frame.prints_length()]);
        reader.unseal_prints(number, &mut own)?;
    }
    check_frame(keys, reader, number, raw, &own, Depth::Identities)
}
