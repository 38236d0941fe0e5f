//! Rebuilds the index from the directories of packs.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::format::index::{SegmentReader, segment_name};
use crate::id::{PackId, SegmentId};
use crate::repository::Repository;
use crate::repository::chunk_index::ChunkIndex;
use crate::repository::damage_records::{DamageExtent, DamageRecord, damage_names, put_damage};
use crate::store::ObjectName;

/// Number of missing packs whose entries are collected in one pass over the index, to limit memory.
const PACK_BATCH_COUNT: usize = 64;

impl Repository {
    /// Records what the index contains about missing packs, and packs with lost directories, before the entries are
    /// dropped.
    pub(super) fn record_loss(&self, packs: &BTreeSet<PackId>) -> Result<()> {
        let known = damage_names(&self.vault)?;
        let wanted: Vec<PackId> = packs.iter().copied().collect();
        for batch in wanted.chunks(PACK_BATCH_COUNT) {
            let mut records: BTreeMap<PackId, DamageRecord> = batch
                .iter()
                .map(|pack| (*pack, DamageRecord::new(self.extent(*pack))))
                .collect();
            let (segments, _) = self.vault.segments()?;
            for segment in &segments {
                if !segment.packs().iter().any(|pack| records.contains_key(pack)) {
                    continue;
                }
                for page in 0..segment.page_count() {
                    // Entries in a damaged page are lost; the other pages are still read.
                    let entries = match segment.page(&*self.vault.store, page) {
                        Err(error) if error.is_about_one_object() => continue,
                        other => other?,
                    };
                    for entry in &entries {
                        if let Some(record) = records.get_mut(&entry.location.pack) {
                            record.add_entry(entry);
                        }
                    }
                }
            }
            for (pack, record) in &records {
                if record.chunks.is_empty() && known.contains_key(pack) {
                    continue;
                }
                put_damage(&self.vault, *pack, record)?;
            }
        }
        Ok(())
    }

    /// The damaged part of a pack with a lost directory.
    fn extent(&self, pack: PackId) -> DamageExtent {
        match self.packs.frame_reader(pack) {
            Ok(_) => DamageExtent::Frames(BTreeSet::new()),
            Err(_) => DamageExtent::Whole,
        }
    }

    /// Writes segments about every pack that the intact segments do not list, and only then deletes the `bad`
    /// ones.
    ///
    /// Packs with unreadable directories are omitted; entries of missing packs are dropped.
    pub(super) fn rebuild_index(&self, bad: &[ObjectName]) -> Result<()> {
        let bad: HashSet<&ObjectName> = bad.iter().collect();
        let (segments, _) = self.vault.segments()?;
        let good: Vec<SegmentReader> = segments
            .into_iter()
            .filter(|segment| !bad.contains(&segment_name(segment.segment)))
            .collect();
        let existing = self.vault.pack_ids()?;
        let covered: HashSet<PackId> = good.iter().flat_map(SegmentReader::packs).copied().collect();
        let mut good_ids: Vec<SegmentId> = good.iter().map(|segment| segment.segment).collect();
        let mut index = ChunkIndex::new(
            Arc::clone(&self.packs),
            self.vault.segment_keys(),
            good,
            existing.clone(),
        );
        let mut write = |index: &mut ChunkIndex| -> Result<()> {
            let segment = SegmentId::from_bytes(self.vault.environment.draw()?);
            index.write_segment(segment)?;
            good_ids.push(segment);
            Ok(())
        };
        let mut has_unwritten = false;
        for pack in existing.difference(&covered) {
            match self.packs.reader(*pack) {
                Ok(reader) if index.adopt(*pack, &reader.directory) => {
                    write(&mut index)?;
                    has_unwritten = false;
                }
                Ok(_) => has_unwritten = true,
                Err(error) if error.is_about_one_object() => {}
                Err(error) => return Err(error),
            }
        }
        if has_unwritten {
            write(&mut index)?;
        }
        bad.into_iter().try_for_each(|name| self.vault.store.delete(name))?;
        self.remove_dangling_entries(&good_ids, &existing)
    }

    /// Rewrites those of `segments` that list missing packs as one segment, without these packs.
    fn remove_dangling_entries(&self, segments: &[SegmentId], existing: &HashSet<PackId>) -> Result<()> {
        let keys = self.vault.segment_keys();
        let mut stale = Vec::new();
        for id in segments {
            let segment = SegmentReader::open(&*self.vault.store, &keys, *id)?;
            // A pack that was created after `existing` was listed is in its writer's own segment, which is not
            // changed.
            let is_stale = |pack: &&PackId| !existing.contains(*pack) && matches!(self.is_absent(**pack), Ok(true));
            if segment.packs().iter().any(|pack| is_stale(&pack)) {
                stale.push(segment);
            }
        }
        if stale.is_empty() {
            return Ok(());
        }
        let mut listed = existing.clone();
        listed.extend(self.vault.pack_ids()?);
        self.vault.merge(&stale, &listed)?;
        for segment in &stale {
            self.vault
                .store
                .delete(&segment_name(segment.segment))
                .map_err(Error::from)?;
        }
        Ok(())
    }
}
