//! Healing: recovers lost chunks of damaged packs that are stored elsewhere.
//!
//! A chunk of a damaged pack that is also stored elsewhere, usually because a backup has stored it again, is found by
//! its id, and a relocation leads from the old location to the new one. Maps are unchanged.

use std::collections::BTreeMap;

use crate::error::Result;
use crate::format::pack::Location;
use crate::format::relocation::{Move, RelocationTable};
use crate::id::PackId;
use crate::repository::Repository;
use crate::repository::damage_records::{DamageRecord, damage_names, read_damage};
use crate::writers::lease::Lease;

impl Repository {
    /// Writes relocations for all lost data of damaged packs that is stored elsewhere; returns the number of bytes.
    ///
    /// The caller must have announced itself, so that the found chunks are not deleted meanwhile.
    pub(crate) fn heal(&self, lease: &Lease<'_>) -> Result<u64> {
        let names = damage_names(&self.vault)?;
        if names.is_empty() {
            return Ok(0);
        }
        self.refresh()?;
        let mut index = self.usable_index(&mut |_| ())?;
        let mut healed_bytes = 0;
        for (pack, names) in &names {
            // An unreadable record names no chunks: nothing can be healed.
            let (Some(record), _) = read_damage(&self.vault, names)? else {
                continue;
            };
            let mut table = RelocationTable::default();
            for part in self.unrelocated_chunks(*pack, &record)? {
                let (frame, chunk_offset) = part.chunk;
                let (chunk_length, identity) = &record.chunks[&(frame, chunk_offset)];
                if let Some(found) = index.find_known(identity, *chunk_length) {
                    let skip = part.location.offset - chunk_offset;
                    table.add(Move {
                        frame: part.location.frame,
                        offset: part.location.offset,
                        length: part.length,
                        to: found.advance(skip.into()),
                    });
                    healed_bytes += u64::from(part.length);
                }
            }
            self.commit_moves(lease, [(*pack, table)].into())?;
        }
        if healed_bytes > 0 {
            self.refresh()?;
        }
        Ok(healed_bytes)
    }

    /// The parts of the recorded chunks of `pack` without a relocation.
    pub(crate) fn unrelocated_chunks(&self, pack: PackId, record: &DamageRecord) -> Result<Vec<UnrelocatedPart>> {
        let mut parts = Vec::new();
        for (&(frame, offset), (length, _)) in &record.chunks {
            for (location, length) in self.unrelocated_parts(Location { pack, frame, offset }, *length)? {
                parts.push(UnrelocatedPart {
                    location,
                    length,
                    chunk: (frame, offset),
                });
            }
        }
        Ok(parts)
    }

    /// The parts of the `length` bytes at `location` without a relocation.
    pub(crate) fn unrelocated_parts(&self, location: Location, length: u32) -> Result<Vec<(Location, u32)>> {
        let mut parts = Vec::new();
        let mut done = 0;
        while done < length {
            let from = location.advance(done.into());
            let (place, together) = self.packs.resolve(from, (length - done).into())?;
            let together = u32::try_from(together).expect("a part of a chunk is as short as a chunk");
            if place == from {
                parts.push((from, together));
            }
            done += together;
        }
        Ok(parts)
    }
}

/// A part of a chunk of a damaged pack that has no relocation.
pub(crate) struct UnrelocatedPart {
    pub(crate) location: Location,
    pub(crate) length: u32,
    /// Frame and offset of the chunk.
    pub(crate) chunk: (u32, u32),
}

/// Damaged packs and their records.
pub(crate) type Damaged = BTreeMap<PackId, DamageRecord>;
