//! Checks grain directories and tables.

use std::cmp::Ordering;
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use super::SECTOR_BYTES;
use super::extent::SparseExtent;
use super::redundant_directory::{DirectoryFinding, DirectoryPair};
use super::stream::{GRAIN_MARKER_BYTES, grain_marker, stored_bytes_max};
use super::tables::{OpenedVmdk, VmdkExtentKind, has_overlap, past_end};
use crate::allocation_table::{end_of_block, for_each_entry};
use crate::file::ImageFile;
use crate::{CheckReport, ProblemKind, Result, Severity};

pub(crate) fn check(opened: &OpenedVmdk) -> Result<CheckReport> {
    let mut report = CheckReport::default();
    for part in &opened.parts {
        let grain = match &part.kind {
            VmdkExtentKind::Sparse { window, extent } => {
                let file = opened.files.at(*window)?;
                check_sparse(&**file, extent, part.start, &mut report)?;
                extent.grain_bytes
            }
            VmdkExtentKind::Flat { .. } | VmdkExtentKind::Zero => part.length.max(1),
        };
        report.cluster_count += part.length.div_ceil(grain);
    }
    Ok(report)
}

/// Checks the extent in `file`, which begins at `start` of the disk.
pub(super) fn check_sparse(
    file: &dyn ImageFile,
    extent: &SparseExtent,
    start: u64,
    report: &mut CheckReport,
) -> Result<()> {
    check_directories(file, extent, report)?;
    let mut grains = GrainChecker {
        file,
        file_bytes: file.length_bytes()?,
        disk_end: start + extent.disk_bytes,
        extent,
        metadata: extent.metadata(file)?,
        seen: BTreeMap::new(),
        report,
    };
    if has_overlap(&grains.metadata) {
        let detail = "two of its tables overlap, or one overlaps the header or the descriptor".to_owned();
        grains.corruption(ProblemKind::Structure { detail });
    }
    let past: Vec<u64> = past_end(&grains.metadata, grains.file_bytes).collect();
    for offset in past {
        grains.corruption(ProblemKind::Pointer {
            what: "table or directory",
            offset,
        });
    }
    let mut tables = Vec::new();
    for_each_entry(file, extent.directory, extent.table_count(), |number, entry| {
        let place = u64::from(u32::from_le_bytes(entry)) * SECTOR_BYTES;
        if place != 0 {
            tables.push((number, place));
        }
    })?;
    for (number, place) in tables {
        if place + extent.table_entries * 4 > grains.file_bytes {
            // It was reported above.
            continue;
        }
        let first = start + number * extent.table_coverage();
        let mut entries = Vec::new();
        for_each_entry(file, place, extent.table_entries, |index, entry| {
            entries.push((u32::from_le_bytes(entry), first + index * extent.grain_bytes));
        })?;
        for (sector, disk_offset) in entries {
            grains.entry(sector, disk_offset)?;
        }
    }
    Ok(())
}

/// Reports whether the directories differ, and whether the extent is marked as open. No data is lost as long as the
/// first directory, which is read, can be the right one.
fn check_directories(file: &dyn ImageFile, extent: &SparseExtent, report: &mut CheckReport) -> Result<()> {
    let mut add = |severity: Severity, detail: String| report.add(severity, ProblemKind::Structure { detail });
    if extent.is_open {
        add(Severity::Leak, "it was not closed cleanly, or is open".to_owned());
    }
    if extent.is_compressed {
        return Ok(());
    }
    let (mut count, mut doubt_count) = (0_u64, 0_u64);
    let pair = DirectoryPair::load(file, extent)?;
    let overlaid_count = pair.overlaid_count();
    pair.for_each(|finding| {
        match finding {
            DirectoryFinding::Doubt { .. } | DirectoryFinding::Uncertain => doubt_count += 1,
            // After a crash, the second directory may have a grain that the first one does not have yet.
            DirectoryFinding::Entry { .. } | DirectoryFinding::Table { .. } => count += 1,
            DirectoryFinding::LostTable { .. } | DirectoryFinding::LostEntry { .. } => {}
        }
        Ok(())
    })?;
    if overlaid_count > 0 {
        let detail = format!("{overlaid_count} of its directories and tables overlap grains of the disk");
        add(Severity::Corruption, detail);
    }
    if doubt_count > 0 {
        let detail = format!("its two directories differ in {doubt_count} entries, and it is unknown which is right");
        add(Severity::Corruption, detail);
    }
    if count > 0 {
        let what = "directories";
        report.add(Severity::Leak, ProblemKind::Copies { what, count });
    }
    Ok(())
}

/// Limit of different grain alignments that are tracked. A consistent image has one.
const PHASE_COUNT_MAX: usize = 16;

/// Checks the grains of an extent one by one.
struct GrainChecker<'a> {
    file: &'a dyn ImageFile,
    file_bytes: u64,
    /// End of the extent on the disk.
    disk_end: u64,
    extent: &'a SparseExtent,
    /// Ranges that contain metadata, sorted.
    metadata: Vec<Range<u64>>,
    /// Bitmaps of the grains found so far, by alignment of the grain and by word.
    seen: BTreeMap<u64, HashMap<u64, u64>>,
    report: &'a mut CheckReport,
}

impl GrainChecker<'_> {
    fn corruption(&mut self, kind: ProblemKind) {
        self.report.add(Severity::Corruption, kind);
    }

    /// Checks the entry of the grain at `disk_offset`.
    fn entry(&mut self, sector: u32, disk_offset: u64) -> Result<()> {
        if sector == 0 || sector == 1 && self.extent.has_zero_grains {
            return Ok(());
        }
        let host = u64::from(sector) * SECTOR_BYTES;
        self.report.allocated_count += 1;
        self.report.compressed_count += u64::from(self.extent.is_compressed);
        self.report.image_end = self.report.image_end.max(host + self.extent.grain_bytes);
        let end = if self.extent.is_compressed {
            self.end_of_compressed(host)?
        } else {
            let of_disk = self.disk_end.saturating_sub(disk_offset);
            end_of_block(host, 0, self.extent.grain_bytes, of_disk)
        };
        if end > self.file_bytes {
            let detail = format!("its grain at {host} extends past the end of the file");
            self.corruption(ProblemKind::Entry { disk_offset, detail });
            return Ok(());
        }
        let unit = if self.extent.is_compressed {
            SECTOR_BYTES
        } else {
            self.extent.grain_bytes
        };
        let next = self.metadata.partition_point(|range| range.start <= host);
        let before = next.checked_sub(1).and_then(|index| self.metadata.get(index));
        let is_inside = before.is_some_and(|range| range.end > host);
        let is_over = self.metadata.get(next).is_some_and(|range| range.start < host + unit);
        if is_inside || is_over {
            self.overlap(host, "a table");
        }
        if self.seen.len() == PHASE_COUNT_MAX && !self.seen.contains_key(&(host % unit)) {
            let detail = format!("its grain at {host} is not aligned like the others");
            self.corruption(ProblemKind::Entry { disk_offset, detail });
        } else if self.is_over_another(host, unit) {
            self.overlap(host, "another grain");
        }
        Ok(())
    }

    /// Where the compressed grain at `host` ends at least. Its marker has the length, and is read only if the file may
    /// end before.
    fn end_of_compressed(&self, host: u64) -> Result<u64> {
        let marker_end = host + GRAIN_MARKER_BYTES as u64;
        if marker_end + stored_bytes_max(self.extent.grain_bytes) <= self.file_bytes || marker_end > self.file_bytes {
            return Ok(marker_end);
        }
        let mut marker = [0; GRAIN_MARKER_BYTES];
        self.file.read_at(&mut marker, host)?;
        let (_, stored) = grain_marker(&marker);
        Ok(marker_end.saturating_add(stored))
    }

    /// Whether a grain of `unit` bytes at `host` overlaps an earlier one. Records it.
    fn is_over_another(&mut self, host: u64, unit: u64) -> bool {
        let (number, phase) = (host / unit, host % unit);
        let has = |words: &HashMap<u64, u64>, number: u64| {
            let word = words.get(&(number / 64)).copied().unwrap_or_default();
            word >> (number % 64) & 1 == 1
        };
        let is_over = self.seen.iter().any(|(other, words)| match other.cmp(&phase) {
            Ordering::Less => has(words, number) || has(words, number + 1),
            Ordering::Equal => has(words, number),
            Ordering::Greater => has(words, number) || number > 0 && has(words, number - 1),
        });
        let words = self.seen.entry(phase).or_default();
        *words.entry(number / 64).or_default() |= 1 << (number % 64);
        is_over
    }

    fn overlap(&mut self, offset: u64, first: &'static str) {
        self.corruption(ProblemKind::Overlap {
            offset,
            first,
            second: "a grain of the disk",
        });
    }
}
