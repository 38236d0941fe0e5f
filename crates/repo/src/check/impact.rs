//! Which disks need damaged bytes.
//!
//! Maps are walked only if there is damage.

use std::collections::{BTreeMap, HashSet};

use crate::check::finding::{DamagedPart, Findings, PlaceSet, RangeList, TouchedDisk};
use crate::check::map_walk::{MapItem, Verdict, Visitor, walk_disk};
use crate::error::Result;
use crate::format::manifest::{DiskRecord, Manifest};
use crate::id::PackId;
use crate::read::frame_set::PageSet;
use crate::repository::packs::Packs;

/// Finds the ranges of the disks of `manifests` that need a frame that `is_wanted` maps to a place, or anything
/// unreadable; grouped by place.
pub(crate) fn impact(
    packs: &Packs,
    manifests: &[Manifest],
    is_wanted: &dyn Fn(PackId, u32) -> Option<DamagedPart>,
    mut found: impl FnMut(DamagedPart, TouchedDisk),
) -> Result<()> {
    let mut known = PageSet::default();
    for manifest in manifests {
        for disk in &manifest.disks {
            for (place, ranges) in disk_impact(packs, disk, is_wanted, &mut known)? {
                found(place, ranges.into_touched_disk(manifest, &disk.name));
            }
        }
    }
    Ok(())
}

/// The ranges of one disk that need one of `places`, or anything else unreadable; grouped by place.
fn disk_impact(
    packs: &Packs,
    disk: &DiskRecord,
    is_wanted: &dyn Fn(PackId, u32) -> Option<DamagedPart>,
    known: &mut PageSet,
) -> Result<BTreeMap<DamagedPart, RangeList>> {
    let mut walker = Impact {
        is_wanted,
        ranges: BTreeMap::new(),
    };
    walk_disk(packs, disk, Some(known), &mut walker)?;
    Ok(walker.ranges)
}

/// Adds the affected disks of `manifests` to each finding. Returns the places that the disks need.
pub(crate) fn add_impact(
    packs: &Packs,
    manifests: &[Manifest],
    findings: &mut Findings,
) -> Result<HashSet<DamagedPart>> {
    let mut needed = HashSet::new();
    if !findings.has_places() {
        return Ok(needed);
    }
    let places: PlaceSet = findings.places().collect();
    impact(
        packs,
        manifests,
        &|pack, frame| places.find(pack, frame),
        |place, touched| {
            findings.touch(place, vec![touched]);
            needed.insert(place);
        },
    )?;
    Ok(needed)
}

/// The packs that `is_suspect` selects or that are unreadable, and of which `manifests` need bytes of disks or pages of
/// maps.
pub(crate) fn needed_packs(
    packs: &Packs,
    manifests: &[Manifest],
    is_suspect: &dyn Fn(PackId) -> bool,
) -> Result<HashSet<PackId>> {
    let mut needs = NeededPacks {
        is_suspect,
        packs: HashSet::new(),
    };
    let mut known = PageSet::default();
    for disk in manifests.iter().flat_map(|manifest| &manifest.disks) {
        walk_disk(packs, disk, Some(&mut known), &mut needs)?;
    }
    Ok(needs.packs)
}

struct NeededPacks<'a> {
    is_suspect: &'a dyn Fn(PackId) -> bool,
    packs: HashSet<PackId>,
}

impl Visitor for NeededPacks<'_> {
    /// A subtree needs to be visited only once, so the verdict is always clean.
    fn visit(&mut self, visit: MapItem) -> Result<Verdict> {
        match visit {
            MapItem::Zero(_) | MapItem::Known(_) => {}
            MapItem::Page { place } | MapItem::Piece { place, .. } => {
                if (self.is_suspect)(place.pack) {
                    self.packs.insert(place.pack);
                }
            }
            MapItem::Unreadable { place, error, .. } => {
                // Errors that are not about a single object end the walk.
                crate::check::finding::classify(error)?;
                self.packs.insert(place.pack());
            }
        }
        Ok(Verdict::Clean)
    }
}

struct Impact<'a> {
    is_wanted: &'a dyn Fn(PackId, u32) -> Option<DamagedPart>,
    ranges: BTreeMap<DamagedPart, RangeList>,
}

impl Visitor for Impact<'_> {
    fn visit(&mut self, visit: MapItem) -> Result<Verdict> {
        let (place, range) = match visit {
            MapItem::Zero(_) | MapItem::Known(_) | MapItem::Page { .. } => return Ok(Verdict::Clean),
            MapItem::Piece {
                disk_offset,
                place,
                length,
            } => match (self.is_wanted)(place.pack, place.frame) {
                None => return Ok(Verdict::Clean),
                Some(found) => (found, disk_offset..disk_offset + length),
            },
            MapItem::Unreadable { range, place, error } => {
                // Errors that are not about a single object end the walk.
                crate::check::finding::classify(error)?;
                let found = match place {
                    DamagedPart::Pack(pack) => (self.is_wanted)(pack, 0).unwrap_or(DamagedPart::Pack(pack)),
                    DamagedPart::Frame(pack, frame) => (self.is_wanted)(pack, frame).unwrap_or(place),
                };
                (found, range)
            }
        };
        self.ranges.entry(place).or_default().push(range);
        Ok(Verdict::Touched)
    }
}
