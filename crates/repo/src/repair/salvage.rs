//! Saves intact data of damaged packs, and deletes packs when nothing is left in them.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use super::heal::Damaged;
use super::rebuild::{Rebuilt, rebuild};
use crate::error::{Error, Result};
use crate::format::pack::{Directory, Location, PackReader, pack_name};
use crate::gc::mark::LiveRange;
use crate::gc::repack::repack;
use crate::id::PackId;
use crate::repository::Repository;
use crate::repository::damage_records::{DamageExtent, DamageRecord, clear_damage};
use crate::writers::lease::Lease;

impl Repository {
    /// Stores intact data of damaged packs again and adds relocations; deletes packs in which nothing is left.
    ///
    /// Returns the deleted packs. A pack is deleted only when *every* byte of it is relocated, so that all references
    /// remain valid.
    pub(super) fn salvage(&self, lease: &Lease<'_>, damaged: &Damaged, thread_count: usize) -> Result<Vec<PackId>> {
        let mut deleted = Vec::new();
        for (pack, record) in damaged {
            let found = match self.packs.frame_reader(*pack) {
                Ok(reader) => reader,
                Err(error) if error.is_about_one_object() => continue,
                Err(error) => return Err(error),
            };
            let is_doubtful = found.flaw().is_some() || record.extent == DamageExtent::Whole;
            let Rebuilt { reader, record } = if is_doubtful {
                let keys = self.vault.fingerprint_keys();
                match rebuild(&self.packs, &keys, &found, record) {
                    Err(Error::MissingPack { .. }) => continue,
                    rebuilt => rebuilt?,
                }
            } else {
                let (reader, record) = (found, record.clone());
                Rebuilt { reader, record }
            };
            let ranges = self.whole_ranges(&reader, &record)?;
            if !ranges.is_empty() {
                let old = HashMap::from([(*pack, ranges)]);
                let readers = HashMap::from([(*pack, Arc::clone(&reader))]);
                let repacked = repack(self, lease.record.writer, &old, &readers, thread_count)?;
                self.write_index(&repacked.packs)?;
                self.commit_moves(lease, repacked.tables)?;
                self.refresh()?;
            }
            if self.is_fully_relocated(*pack, &reader.directory)? {
                lease.check()?;
                self.vault.store.delete(&pack_name(*pack))?;
                self.packs.forget(*pack);
                clear_damage(&self.vault, *pack)?;
                deleted.push(*pack);
            }
        }
        Ok(deleted)
    }

    /// The ranges of intact frames that are not relocated yet.
    fn whole_ranges(&self, reader: &PackReader, record: &DamageRecord) -> Result<Vec<LiveRange>> {
        let mut ranges = Vec::new();
        for (number, entry) in (0u32..).zip(reader.directory.frames()) {
            if record.covers(number) {
                continue;
            }
            for (place, length) in self.unrelocated_parts(frame_start(reader.pack, number), entry.raw_length)? {
                ranges.push(LiveRange {
                    frame: number,
                    offset: place.offset,
                    length,
                });
            }
        }
        Ok(ranges)
    }

    /// Whether every byte of the pack is relocated.
    fn is_fully_relocated(&self, pack: PackId, directory: &Directory) -> Result<bool> {
        for (number, entry) in (0u32..).zip(directory.frames()) {
            if !self
                .unrelocated_parts(frame_start(pack, number), entry.raw_length)?
                .is_empty()
            {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

fn frame_start(pack: PackId, frame: u32) -> Location {
    Location { pack, frame, offset: 0 }
}

/// Number of bytes in each pack without a relocation.
pub(super) fn lost_bytes(repository: &Repository, damaged: &Damaged) -> Result<BTreeMap<PackId, u64>> {
    let mut lost = BTreeMap::new();
    for (pack, record) in damaged {
        let parts = repository.unrelocated_chunks(*pack, record)?;
        let bytes = parts
            .iter()
            .filter(|part| record.covers(part.location.frame))
            .map(|part| u64::from(part.length))
            .sum();
        lost.insert(*pack, bytes);
    }
    Ok(lost)
}
