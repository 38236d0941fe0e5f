//! Differences that verify finds between a disk and a device.

use std::ops::Range;

use holdfast_block::BlockDevice;

use crate::check::finding::{FindingKind, Findings, RangeList};
use crate::error::Result;
use crate::format::manifest::{Manifest, snapshot_name};
use crate::id::SnapshotId;

/// The differences found between a disk and a device.
#[derive(Debug, Default)]
pub(crate) struct Differing {
    ranges: Vec<Range<u64>>,
    unlisted_bytes: u64,
    pub(crate) compared_bytes: u64,
}

/// Maximum number of difference ranges that are kept before they are joined.
const DIFFERENCE_COUNT_MAX: usize = 1 << 16;

impl Differing {
    pub(crate) fn push(&mut self, range: Range<u64>) {
        let has_room = self.ranges.len() < DIFFERENCE_COUNT_MAX;
        match self.ranges.last_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            _ if has_room => self.ranges.push(range),
            _ => self.unlisted_bytes += range.end - range.start,
        }
    }
}

/// Adds a finding if a disk differs from the device; returns the number of bytes compared.
pub(crate) fn report_differing(
    manifest: &Manifest,
    compare: &Compare<'_>,
    mut differing: Differing,
    findings: &mut Findings,
) -> Result<u64> {
    let disk = manifest.disk(compare.disk)?;
    let name = snapshot_name(manifest.id);
    let (disk_bytes, device_bytes) = (disk.size_bytes, compare.device.size_bytes());
    if disk_bytes != device_bytes {
        let detail = format!(
            "disk {} has {disk_bytes} bytes, the device it is compared with {device_bytes}",
            disk.name
        );
        findings.push(&name, None, FindingKind::Differs, detail);
    }
    if !differing.ranges.is_empty() {
        differing.ranges.sort_unstable_by_key(|range| range.start);
        let mut ranges = RangeList::default();
        differing.ranges.into_iter().for_each(|range| ranges.push(range));
        let mut touched = ranges.into_touched_disk(manifest, &disk.name);
        touched.bytes += differing.unlisted_bytes;
        let detail = format!("disk {} differs from the device in {} bytes", disk.name, touched.bytes);
        findings.push(&name, None, FindingKind::Differs, detail);
        findings.touch_last(touched);
    }
    Ok(differing.compared_bytes)
}

/// A disk and the device that it should equal.
#[derive(Clone, Copy)]
pub struct Compare<'a> {
    /// The snapshot; it is verified even if it is not selected.
    pub snapshot: SnapshotId,
    /// The disk's name; `None` for the only disk.
    pub disk: Option<&'a str>,
    /// The device to compare with; a different size is a separate finding.
    pub device: &'a dyn BlockDevice,
}
