//! LVM2: from physical volumes to linear logical volumes.
//!
//! Each physical volume has a label, and usually a copy of the text that describes its volume group. The copy with the
//! greatest sequence number of a group counts. A logical volume is a list of segments; a linear segment lies on one
//! physical volume. All other kinds of segments are refused by name: reading them as linear would return wrong bytes.

mod label;
mod text;

use std::collections::{BTreeMap, BTreeSet};

use holdfast_block::SliceDevice;

use self::text::Section;
use super::detect::{Content, detect};
use super::{DiskSource, Found, Unreadable, Volume, VolumeSegment};
use crate::{Error, Result};

/// Extents and offsets in the text are in sectors of this size.
const SECTOR_BYTES: u64 = 512;
const VOLUME_COUNT_MAX: usize = 4096;
const SEGMENT_COUNT_MAX: u64 = 1 << 20;

/// A volume group by its newest description.
struct VolumeGroup {
    identity: String,
    name: String,
    sequence_number: u64,
    section: Section,
}

/// Adds the logical volumes on `members`, which are the segments that hold physical volumes.
pub(super) fn add_logical_volumes(disks: &[DiskSource], members: &[VolumeSegment], found: &mut Found) -> Result<()> {
    let mut groups: BTreeMap<String, VolumeGroup> = BTreeMap::new();
    let mut places: BTreeMap<String, VolumeSegment> = BTreeMap::new();
    for segment in members {
        let Some(disk) = disks.get(segment.disk) else { continue };
        let end = segment.start_bytes + segment.size_bytes;
        let device = SliceDevice::new(&*disk.device, segment.start_bytes..end)?;
        let physical = match label::read(&device) {
            Err(Error::Device(error)) => return Err(error.into()),
            Err(error) => {
                found.notes.push(format!("{}: {error}", disk.name));
                continue;
            }
            Ok(physical) => physical,
        };
        if places.insert(physical.identity.clone(), *segment).is_some() {
            found.notes.push(format!(
                "{}: two disks hold the physical volume {} of LVM, the last one is used",
                disk.name, physical.identity
            ));
        }
        for text in label::texts(&device, &physical)? {
            match group_of(&text) {
                Ok(group) => add_newest(&mut groups, group),
                Err(error) => found.notes.push(format!("{}: {error}", disk.name)),
            }
        }
    }
    for group in groups.values() {
        if let Err(error) = add_group(disks, group, &places, found) {
            if let Error::Device(error) = error {
                return Err(error.into());
            }
            found.notes.push(format!("the volume group {}: {error}", group.name));
        }
    }
    Ok(())
}

fn group_of(text: &str) -> Result<VolumeGroup> {
    let root = text::parse(text)?;
    for (name, section) in root.sections() {
        if let Some(identity) = section.text("id") {
            return Ok(VolumeGroup {
                identity: identity.to_owned(),
                name: name.to_owned(),
                sequence_number: section.number("seqno").unwrap_or(0),
                section: section.clone(),
            });
        }
    }
    Err(Error::damaged("LVM metadata", "it describes no volume group"))
}

/// Keeps the newest description of a group.
fn add_newest(groups: &mut BTreeMap<String, VolumeGroup>, group: VolumeGroup) {
    let known = groups.get(&group.identity).map_or(0, |known| known.sequence_number);
    if group.sequence_number >= known {
        groups.insert(group.identity.clone(), group);
    }
}

/// The place of the extents of a physical volume.
struct ExtentArea {
    segment: VolumeSegment,
    /// First extent, in bytes from the start of the physical volume.
    start_bytes: u64,
}

fn add_group(
    disks: &[DiskSource],
    group: &VolumeGroup,
    places: &BTreeMap<String, VolumeSegment>,
    found: &mut Found,
) -> Result<()> {
    let section = &group.section;
    let extent_bytes = section
        .number("extent_size")
        .and_then(|size| size.checked_mul(SECTOR_BYTES));
    let extent_bytes = extent_bytes
        .filter(|size| *size > 0)
        .ok_or_else(|| Error::damaged("LVM metadata", "the group has no size of extents"))?;
    let mut areas: BTreeMap<&str, Option<ExtentArea>> = BTreeMap::new();
    for (name, physical) in section
        .section("physical_volumes")
        .iter()
        .flat_map(|list| list.sections())
    {
        let identity = physical.text("id").unwrap_or_default().replace('-', "");
        let start_bytes = physical
            .number("pe_start")
            .and_then(|start| start.checked_mul(SECTOR_BYTES));
        let start_bytes =
            start_bytes.ok_or_else(|| Error::damaged("LVM metadata", format!("{name} has no first extent")))?;
        let area = places.get(&identity).map(|segment| ExtentArea {
            segment: *segment,
            start_bytes,
        });
        areas.insert(name, area);
    }
    let Some(list) = section.section("logical_volumes") else {
        return Ok(());
    };
    let snapshots = snapshot_stores(list);
    let layout = GroupLayout { extent_bytes, areas };
    for (name, logical) in list.sections() {
        let is_visible = logical.texts("status").iter().any(|status| status == "VISIBLE");
        if !is_visible
            || logical
                .sections()
                .any(|(_, segment)| segment.text("type") == Some("snapshot"))
        {
            continue;
        }
        if found.volumes.len() >= VOLUME_COUNT_MAX {
            return Err(Error::TooLarge {
                what: "the number of volumes".into(),
                limit: VOLUME_COUNT_MAX as u64,
            });
        }
        let mapped = if snapshots.contains(name) {
            Err(Unreadable("a copy-on-write snapshot of LVM".to_owned()))
        } else {
            layout.map(logical)
        };
        found.volumes.push(volume(
            disks,
            format!("{}/{name}", group.name),
            mapped,
            layout.size_of(logical),
        )?);
    }
    Ok(())
}

/// The volumes that hold the changed blocks of snapshots: their bytes are no image of a volume.
fn snapshot_stores(list: &Section) -> BTreeSet<&str> {
    let volumes = list.sections().map(|(_, volume)| volume);
    let segments = volumes.flat_map(Section::sections).map(|(_, segment)| segment);
    segments.filter_map(|segment| segment.text("cow_store")).collect()
}

fn volume(
    disks: &[DiskSource],
    name: String,
    mapped: std::result::Result<Vec<VolumeSegment>, Unreadable>,
    size_bytes: u64,
) -> Result<Volume> {
    let mut volume = Volume {
        disks: Vec::new(),
        name,
        size_bytes,
        content: Content::Unknown,
        label: None,
        unreadable: None,
        segments: Vec::new(),
    };
    match mapped {
        Err(reason) => volume.unreadable = Some(reason),
        Ok(segments) => {
            let numbers: BTreeSet<usize> = segments.iter().map(|segment| segment.disk).collect();
            let names = numbers.iter().filter_map(|number| disks.get(*number));
            volume.disks = names.map(|disk| disk.name.clone()).collect();
            volume.segments = segments;
            let detected = detect(&volume.device(disks))?;
            volume.content = detected.content;
            volume.label = detected.label;
        }
    }
    Ok(volume)
}

struct GroupLayout<'a> {
    extent_bytes: u64,
    areas: BTreeMap<&'a str, Option<ExtentArea>>,
}

impl GroupLayout<'_> {
    /// The size that the segments of a volume add up to.
    fn size_of(&self, logical: &Section) -> u64 {
        let counts = logical
            .sections()
            .filter_map(|(_, segment)| segment.number("extent_count"));
        counts.fold(0, |sum: u64, count| {
            sum.saturating_add(count.saturating_mul(self.extent_bytes))
        })
    }

    /// The ranges of a linear volume, in order.
    fn map(&self, logical: &Section) -> std::result::Result<Vec<VolumeSegment>, Unreadable> {
        let unreadable = |reason: &str| Unreadable(reason.to_owned());
        let count = logical.number("segment_count").unwrap_or(0);
        if count == 0 || count > SEGMENT_COUNT_MAX {
            return Err(unreadable("LVM metadata without segments"));
        }
        let mut segments = Vec::new();
        let mut next_extent = 0;
        for number in 1..=count {
            let section = logical
                .section(&format!("segment{number}"))
                .ok_or_else(|| Unreadable(format!("LVM metadata without segment {number}")))?;
            let kind = section.text("type").unwrap_or("unknown");
            if kind != "striped" || section.number("stripe_count") != Some(1) {
                return Err(Unreadable(refused_kind(kind)));
            }
            if section.number("start_extent") != Some(next_extent) {
                return Err(unreadable("LVM metadata with a gap between segments"));
            }
            let extent_count = section.number("extent_count").filter(|count| *count > 0);
            let extent_count = extent_count.ok_or_else(|| unreadable("LVM metadata with an empty segment"))?;
            next_extent += extent_count;
            let (Some(area_name), Some(first)) = (section.first_text("stripes"), section.first_number("stripes"))
            else {
                return Err(unreadable("LVM metadata with an invalid segment"));
            };
            let area = match self.areas.get(area_name) {
                Some(Some(area)) => area,
                Some(None) => {
                    return Err(Unreadable(format!(
                        "the physical volume {area_name} is on a disk that is not there"
                    )));
                }
                None => return Err(unreadable("LVM metadata with an unknown physical volume")),
            };
            segments.push(self.segment(area, first, extent_count)?);
        }
        Ok(segments)
    }

    fn segment(
        &self,
        area: &ExtentArea,
        first: u64,
        extent_count: u64,
    ) -> std::result::Result<VolumeSegment, Unreadable> {
        let size_bytes = extent_count.checked_mul(self.extent_bytes);
        let start = first
            .checked_mul(self.extent_bytes)
            .and_then(|start| start.checked_add(area.start_bytes));
        let end = start.zip(size_bytes).and_then(|(start, size)| start.checked_add(size));
        match (start, size_bytes, end) {
            (Some(start), Some(size_bytes), Some(end)) if end <= area.segment.size_bytes => Ok(VolumeSegment {
                disk: area.segment.disk,
                start_bytes: area.segment.start_bytes + start,
                size_bytes,
            }),
            _ => Err(Unreadable(
                "LVM metadata with a segment past the end of its disk".to_owned(),
            )),
        }
    }
}

fn refused_kind(kind: &str) -> String {
    match kind {
        "striped" => "a striped volume of LVM".to_owned(),
        "thin" => "a thin volume of LVM".to_owned(),
        "thin-pool" => "a thin pool of LVM".to_owned(),
        "cache" | "cache-pool" | "writecache" => "a cached volume of LVM".to_owned(),
        "vdo" | "vdo-pool" => "a VDO volume of LVM".to_owned(),
        kind if kind.starts_with("raid") || kind == "mirror" => format!("a volume of LVM with RAID ({kind})"),
        kind => format!("a volume of LVM of the kind {kind:?}"),
    }
}

/// For tests with hostile text: parses a description and maps all its volumes.
#[cfg(feature = "hostile")]
pub(crate) fn parse_text(text: &str) -> Result<usize> {
    let group = group_of(text)?;
    let mut found = Found::default();
    add_group(&[], &group, &BTreeMap::new(), &mut found)?;
    Ok(found.volumes.len())
}
