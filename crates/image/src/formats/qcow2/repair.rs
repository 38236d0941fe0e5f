//! Repairs an image: corrects refcounts to the counted references, copied flags to the refcounts, and in mode `All`
//! clears invalid entries.
//!
//! A refcount that is too low, or a copied flag on a shared cluster, loses data with the next write: these are
//! repaired first. Only then, durably, refcounts that are too high are lowered, and missing flags are set. The corrupt
//! mark is cleared last.
//!
//! Nothing is lowered while there are invalid references or cross-linked clusters: the clusters that they referred to
//! originally would look leaked.

use std::collections::HashSet;

use holdfast_block::to_usize;

use super::check::{Checker, count_uses};
use super::entry::{COPIED, ClusterKind, DataLocation, Sharing};
use super::features::{INCOMPATIBLE_CORRUPT, INCOMPATIBLE_DIRTY};
use super::geometry::{OFFSET_MASK, POINTER_BYTES, Qcow2Geometry};
use super::header::{INCOMPATIBLE_AT, Qcow2Header, load_header};
use super::mapping::{entry_in, read_l2_as_is, set_entry_in};
use super::refcount::{StoredRefcounts, get, set};
use super::refcount_table::RefcountTable;
use super::unshare_clusters::ClusterCopies;
use super::{clear_invalid, rebuild, reserved};
use crate::error::corrupt;
use crate::file::ImageFile;
use crate::model::bytes::{from_words, to_words};
use crate::model::mapped_extent::KnownLength;
use crate::model::repair_action::{RepairAction, RepairMode};
use crate::{Error, Result};

/// Repairs the image in `file`; `data` is its external data file, if it has one.
pub(crate) fn repair(
    file: &dyn ImageFile,
    data: Option<&dyn ImageFile>,
    image: &str,
    mode: RepairMode,
    actions: &mut Vec<RepairAction>,
) -> Result<()> {
    let mut header = load_header(file, image)?;
    let mut uses = count_uses(file, &header, image)?;
    if mode == RepairMode::All && uses.damage_count > 0 {
        drop(uses);
        clear_invalid::discard_invalid(file, image, actions)?;
        // Tables first, then the clusters that both tables refer to.
        if unshare(file, image, actions)? {
            unshare(file, image, actions)?;
        }
        header = load_header(file, image)?;
        uses = count_uses(file, &header, image)?;
    }
    if mode == RepairMode::All && uses.reserved_count > 0 {
        reserved::clear(file, &header, &uses, image, actions)?;
    }
    let repairer = Repairer {
        file,
        geometry: header.geometry,
        header: &header,
        image,
        is_whole: uses.damage_count == 0,
    };
    match StoredRefcounts::load(file, &header, image) {
        Ok(stored) if repairer.is_sound(&stored, &uses) => repairer.in_place(&stored, &mut uses, mode, actions)?,
        Ok(_) | Err(Error::Corrupt { .. }) if mode >= RepairMode::Safe && repairer.is_whole => {
            repairer.rebuild_refcounts(&mut uses, actions)?;
        }
        Ok(_) | Err(Error::Corrupt { .. }) => {}
        Err(error) => return Err(error),
    }
    if mode >= RepairMode::Safe {
        clear_marks(file, data, image, actions)?;
    }
    Ok(())
}

/// Copies shared tables or clusters; false if there are none.
fn unshare(file: &dyn ImageFile, image: &str, actions: &mut Vec<RepairAction>) -> Result<bool> {
    let header = load_header(file, image)?;
    let mut uses = count_uses(file, &header, image)?;
    let Some(copies) = ClusterCopies::make(file, &header, &mut uses, image)? else {
        return Ok(false);
    };
    let repairer = Repairer {
        file,
        geometry: header.geometry,
        header: &header,
        image,
        is_whole: uses.damage_count <= copies.count(),
    };
    match StoredRefcounts::load(file, &header, image) {
        Ok(stored) if repairer.is_sound(&stored, &uses) => {
            repairer.change_counts(&copies.counts, |_, before, counted| before.max(counted))?;
            file.sync()?;
        }
        Ok(_) | Err(Error::Corrupt { .. }) if repairer.is_whole => repairer.rebuild_refcounts(&mut uses, actions)?,
        Ok(_) | Err(Error::Corrupt { .. }) => return Ok(false),
        Err(error) => return Err(error),
    }
    actions.push(copies.redirect()?);
    Ok(true)
}

/// Clears the marks of an image that is consistent now.
fn clear_marks(
    file: &dyn ImageFile,
    data: Option<&dyn ImageFile>,
    image: &str,
    actions: &mut Vec<RepairAction>,
) -> Result<()> {
    let header = load_header(file, image)?;
    let marks = header.incompatible & (INCOMPATIBLE_DIRTY | INCOMPATIBLE_CORRUPT);
    if marks == 0 || !super::check::is_sound(file, data, &header, image)? {
        return Ok(());
    }
    file.sync()?;
    file.write_at(&(header.incompatible & !marks).to_be_bytes(), INCOMPATIBLE_AT)?;
    file.sync()?;
    for (bit, mark) in [
        (INCOMPATIBLE_DIRTY, "was not closed cleanly"),
        (INCOMPATIBLE_CORRUPT, "is corrupt"),
    ] {
        if marks & bit != 0 {
            actions.push(RepairAction::MarkCleared { mark });
        }
    }
    Ok(())
}

/// Which copied flags are repaired.
#[derive(Clone, Copy, PartialEq, Eq)]
enum RepairedFlags<'f> {
    /// Flags that are set, but must not be: a write in place would change shared data.
    Wrong {
        /// Includes entries in which another bit may be the wrong one.
        with_ambiguous: bool,
    },
    /// Flags that are missing.
    Missing {
        /// Clusters to skip, because they are ambiguous.
        except: &'f HashSet<u64>,
    },
}

struct Repairer<'a> {
    file: &'a dyn ImageFile,
    geometry: Qcow2Geometry,
    header: &'a Qcow2Header,
    image: &'a str,
    /// Whether all references were followed: then clusters without references are unused.
    is_whole: bool,
}

impl Repairer<'_> {
    /// Whether the refcounts can be repaired in place: their clusters are not shared, and there is a block for each
    /// cluster in use.
    fn is_sound(&self, stored: &StoredRefcounts<'_>, uses: &Checker<'_>) -> bool {
        let geometry = self.geometry;
        let start = geometry.cluster_of(self.header.refcount_table_offset);
        let table = start..start + self.header.refcount_table_clusters;
        let mut seen: HashSet<u64> = table.clone().collect();
        let blocks = stored.table.iter().filter(|offset| **offset != 0);
        let is_apart = blocks.clone().all(|offset| {
            let is_inside = uses.can_be_table(*offset) && uses.is_whole_in_file(*offset);
            is_inside && seen.insert(geometry.cluster_of(*offset))
        });
        let entries = geometry.refcount_block_entries();
        let has_block = |cluster: u64| {
            let index = usize::try_from(cluster / entries).unwrap_or(usize::MAX);
            stored.table.get(index).is_some_and(|offset| *offset != 0)
        };
        is_apart
            && seen
                .iter()
                .all(|cluster| uses.counts.of(*cluster) == 0 && has_block(*cluster))
            && uses.counts.rest().iter().all(|(cluster, _)| has_block(*cluster))
    }

    /// Repairs refcounts in place.
    fn in_place(
        &self,
        stored: &StoredRefcounts<'_>,
        uses: &mut Checker<'_>,
        mode: RepairMode,
        actions: &mut Vec<RepairAction>,
    ) -> Result<()> {
        let geometry = self.geometry;
        let start = geometry.cluster_of(self.header.refcount_table_offset);
        let blocks = stored.table.iter().filter(|offset| **offset != 0);
        let blocks = blocks.map(|offset| geometry.cluster_of(*offset));
        for cluster in (start..start + self.header.refcount_table_clusters).chain(blocks) {
            uses.counts.add(cluster, 1, self.image)?;
        }
        let (mut raised_count, mut lowered_count, mut flag_count) = (0, 0, 0);
        let mut ambiguous = HashSet::new();
        if mode >= RepairMode::Safe {
            if mode < RepairMode::All && self.header.incompatible & INCOMPATIBLE_DIRTY == 0 {
                ambiguous = self.ambiguous_clusters(stored, uses)?;
            }
            raised_count = self.change_counts(&uses.counts, |cluster, before, counted| {
                if ambiguous.contains(&cluster) {
                    before
                } else {
                    before.max(counted)
                }
            })?;
            self.file.sync()?;
            let raised = StoredRefcounts::load(self.file, self.header, self.image)?;
            flag_count += self.repair_flags(
                uses,
                RepairedFlags::Wrong {
                    with_ambiguous: mode == RepairMode::All,
                },
                |cluster| {
                    let counted = uses.counts.of(cluster);
                    Ok(if self.is_whole {
                        counted
                    } else {
                        raised.of(cluster)?.max(counted)
                    })
                },
            )?;
            self.file.sync()?;
        }
        if self.is_whole {
            lowered_count = self.change_counts(&uses.counts, |_, before, counted| before.min(counted))?;
            self.file.sync()?;
        }
        // With leaks, too: a lowered refcount may require the flag.
        if mode >= RepairMode::Safe || self.is_whole {
            let now = StoredRefcounts::load(self.file, self.header, self.image)?;
            flag_count += self.repair_flags(uses, RepairedFlags::Missing { except: &ambiguous }, |cluster| {
                let (stored, counted) = (now.of(cluster)?, uses.counts.of(cluster));
                Ok(stored.max(counted))
            })?;
            self.file.sync()?;
        }
        if raised_count + lowered_count > 0 {
            actions.push(RepairAction::Refcounts {
                raised_count,
                lowered_count,
            });
        }
        if flag_count > 0 {
            actions.push(RepairAction::CopiedFlags { count: flag_count });
        }
        Ok(())
    }

    /// Clusters with one active reference that are free by their refcount and whose copied flag is not set. The entry
    /// may be wrong and have referred elsewhere, or nowhere: once the cluster is counted, no check reports it again.
    fn ambiguous_clusters(&self, stored: &StoredRefcounts<'_>, uses: &Checker<'_>) -> Result<HashSet<u64>> {
        let mut ambiguous_clusters = HashSet::new();
        let known = KnownLength::default();
        for (offset, _) in uses.l2_tables.iter().filter(|(_, used)| used.is_active) {
            let table = read_l2_as_is(self.file, &known, self.geometry, *offset, self.image)?;
            for index in 0..self.geometry.l2_entries() {
                let entry = entry_in(&table, index, self.geometry);
                let host = uses.meaning_of(entry).ok().and_then(ClusterKind::host);
                let host = host.filter(|host| host.sharing == Sharing::Shared && uses.place() == DataLocation::Inside);
                let Some(cluster) = host.map(|host| self.geometry.cluster_of(host.offset)) else {
                    continue;
                };
                if uses.counts.of(cluster) == 1 && stored.of(cluster)? == 0 {
                    ambiguous_clusters.insert(cluster);
                }
            }
        }
        Ok(ambiguous_clusters)
    }

    /// Sets refcounts to the result of `choose`, which gets the cluster, the stored and the counted value; returns how
    /// many changed.
    fn change_counts(&self, counts: &RefcountTable, choose: impl Fn(u64, u64, u64) -> u64) -> Result<u64> {
        let stored = StoredRefcounts::load(self.file, self.header, self.image)?;
        let (entries, order) = (self.geometry.refcount_block_entries(), self.geometry.refcount_order);
        let mut count = 0;
        for (index, offset) in (0..).zip(&stored.table) {
            let Some(block) = stored.block(index)? else { continue };
            let mut changed = None;
            for within in 0..entries {
                let cluster = index * entries + within;
                let before = get(&block, within, order);
                let after = choose(cluster, before, counts.of(cluster));
                if after == before {
                    continue;
                }
                if after > self.geometry.refcount_max() {
                    return Err(corrupt(
                        self.image,
                        "refcount",
                        self.geometry.offset_of(cluster),
                        format!("{after} references exceed the maximum refcount"),
                    ));
                }
                set(changed.get_or_insert_with(|| block.to_vec()), within, order, after);
                count += 1;
            }
            if let Some(changed) = changed {
                self.file.write_at(&changed, *offset)?;
            }
        }
        Ok(count)
    }

    /// Repairs the copied flags of the active tables; `refcount` returns the refcount of a cluster. Returns how many
    /// changed.
    fn repair_flags(
        &self,
        uses: &Checker<'_>,
        flags: RepairedFlags<'_>,
        refcount: impl Fn(u64) -> Result<u64>,
    ) -> Result<u64> {
        let geometry = self.geometry;
        let repair = |word: u64, host: u64| -> Result<u64> {
            // An invalid reference was not counted, and its flag has no meaning.
            if uses.counts.of(geometry.cluster_of(host)) == 0 {
                return Ok(word);
            }
            let is_alone = refcount(geometry.cluster_of(host))? == 1;
            Ok(match flags {
                RepairedFlags::Wrong { .. } if !is_alone => word & !COPIED,
                RepairedFlags::Missing { except } if is_alone && !except.contains(&geometry.cluster_of(host)) => {
                    word | COPIED
                }
                _ => word,
            })
        };
        let mut count = 0;
        let mut bytes = vec![0; to_usize(self.header.l1.entries * POINTER_BYTES)];
        self.file.read_at(&mut bytes, self.header.l1.offset)?;
        let mut l1 = to_words(&bytes);
        let before = l1.clone();
        for word in &mut l1 {
            let offset = *word & OFFSET_MASK;
            if offset != 0 && uses.can_be_table(offset) {
                *word = repair(*word, offset)?;
            }
        }
        count += self.write_changed(&before, &l1, self.header.l1.offset)?;
        let known = KnownLength::default();
        let active = uses.l2_tables.iter().filter(|(_, used)| used.is_active);
        for (offset, _) in active {
            let before = read_l2_as_is(self.file, &known, geometry, *offset, self.image)?;
            let mut table = before.clone();
            for index in 0..geometry.l2_entries() {
                let mut entry = entry_in(&table, index, geometry);
                let host = match uses.meaning_of(entry) {
                    // A compressed cluster cannot have the flag: it is more likely that the compressed bit is wrong.
                    // Clearing the flag would hide that from later checks.
                    Ok(ClusterKind::Compressed(_)) if flags == (RepairedFlags::Wrong { with_ambiguous: true }) => {
                        entry.word &= !COPIED;
                        set_entry_in(&mut table, index, entry, geometry);
                        continue;
                    }
                    Ok(
                        ClusterKind::Data { host }
                        | ClusterKind::Zero { host: Some(host) }
                        | ClusterKind::Subclusters { host: Some(host), .. },
                    ) if uses.place() == DataLocation::Inside => host.offset,
                    _ => continue,
                };
                entry.word = repair(entry.word, host)?;
                set_entry_in(&mut table, index, entry, geometry);
            }
            count += self.write_changed(&before, &table, *offset)?;
        }
        Ok(count)
    }

    /// Writes the words of a table at `offset` from the first to the last one that changed; returns how many did.
    fn write_changed(&self, before: &[u64], after: &[u64], offset: u64) -> Result<u64> {
        let changed: Vec<usize> = (0..after.len()).filter(|at| before[*at] != after[*at]).collect();
        if let (Some(first), Some(last)) = (changed.first(), changed.last()) {
            let place = offset + *first as u64 * POINTER_BYTES;
            self.file.write_at(&from_words(&after[*first..=*last]), place)?;
        }
        Ok(changed.len() as u64)
    }

    /// Writes all refcounts anew.
    fn rebuild_refcounts(&self, uses: &mut Checker<'_>, actions: &mut Vec<RepairAction>) -> Result<()> {
        let flag_count = self.repair_flags(uses, RepairedFlags::Wrong { with_ambiguous: false }, |cluster| {
            Ok(uses.counts.of(cluster))
        })?;
        self.file.sync()?;
        let cluster_count = rebuild::rebuild(self.file, self.header, &mut uses.counts, self.image)?;
        actions.push(RepairAction::RefcountsRebuilt { cluster_count });
        let missing = RepairedFlags::Missing {
            except: &HashSet::new(),
        };
        let missing_count = self.repair_flags(uses, missing, |cluster| Ok(uses.counts.of(cluster)))?;
        self.file.sync()?;
        if flag_count + missing_count > 0 {
            actions.push(RepairAction::CopiedFlags {
                count: flag_count + missing_count,
            });
        }
        Ok(())
    }
}
