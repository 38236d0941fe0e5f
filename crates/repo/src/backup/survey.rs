//! Determines what a copy would transfer, without transferring it.

use super::request::StoredDisk;
use crate::backup::from_repository::chunks_of;
use crate::backup::from_repository::walk::{StoredExtentContent, StoredWalk};
use crate::error::Result;
use crate::id::ChunkId;
use crate::read::frame_set::FrameSet;
use crate::repository::Repository;
use crate::repository::chunk_index::ChunkIndex;

/// Memory limit for frames that were counted: about 12 TiB of stored data.
const SEEN_BYTES_MAX: usize = 10 << 20;

/// Estimated amount of data to copy: a frame that several disks need parts of is counted with the part that the first
/// disk needs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CopySurvey {
    /// Bytes to read from the store of the source.
    pub read_bytes: u64,
    /// Bytes of disks to read, before compression; between repositories with the same chunk ids, only what the target
    /// lacks.
    pub new_bytes: u64,
}

/// Determines what copies would transfer, one disk after another; data that one disk brings counts as present
/// for the next.
pub struct Surveyor<'a> {
    target: &'a Repository,
    index: ChunkIndex,
    seen: FrameSet,
}

impl Repository {
    /// Creates a [`Surveyor`] of copies to this repository.
    pub fn surveyor(&self) -> Result<Surveyor<'_>> {
        self.refresh()?;
        // No announcement is needed, since nothing will refer to the result: an outdated index only makes the estimate
        // inexact.
        let (segments, _) = self.vault.segments()?;
        let (packs, keys) = (std::sync::Arc::clone(&self.packs), self.vault.segment_keys());
        Ok(Surveyor {
            index: ChunkIndex::new(packs, keys, segments, self.vault.pack_ids()?),
            target: self,
            seen: FrameSet::new(SEEN_BYTES_MAX),
        })
    }
}

impl Surveyor<'_> {
    /// Counts what a copy of `stored` would transfer.
    pub fn survey_disk(&mut self, stored: &StoredDisk<'_>) -> Result<CopySurvey> {
        let packs = &stored.repository.packs;
        let is_alike = self.target.has_same_fingerprints(stored.repository);
        let mut survey = CopySurvey::default();
        let mut walk = StoredWalk::new(stored);
        while let Some(extents) = walk.next()? {
            for extent in extents {
                let StoredExtentContent::Data(there) = extent.content else {
                    continue;
                };
                let mut done = 0;
                while done < extent.length {
                    let (place, together) = packs.resolve(there.advance(done), extent.length - done)?;
                    done += together;
                    if !self.seen.insert(place.pack, place.frame) {
                        continue;
                    }
                    let reader = packs.frame_reader(place.pack)?;
                    let frame = reader.frame(place.frame)?;
                    let chunks = chunks_of(&reader, frame);
                    let index = &mut self.index;
                    let mut is_known =
                        |(length, id): (u32, Option<ChunkId>)| id.is_some_and(|id| index.find(&id, length).is_some());
                    let missing = chunks.filter(|chunk| !is_alike || !is_known(*chunk));
                    let new_bytes: u64 = missing.map(|(length, _)| u64::from(length)).sum();
                    if new_bytes > 0 {
                        survey.read_bytes += u64::from(frame.stored_length);
                        survey.new_bytes += new_bytes;
                    }
                }
            }
        }
        Ok(survey)
    }
}
