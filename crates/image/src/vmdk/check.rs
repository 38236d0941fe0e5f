//! Holding the tables against the files.

use std::collections::HashMap;

use holdfast_block::to_usize;

use super::SECTOR_BYTES;
use super::extent::SparseExtent;
use super::tables::{Opened, PartKind, has_overlap};
use crate::blocks::for_each_entry;
use crate::file::ImageFile;
use crate::{CheckReport, ProblemKind, Result, Severity};

/// Checks an opened image.
pub(crate) fn check(opened: &Opened) -> Result<CheckReport> {
    let mut report = CheckReport::default();
    for part in &opened.parts {
        let grain = match &part.kind {
            PartKind::Sparse { window, extent } => {
                let file = &opened.files.files[to_usize(window / super::joined::WINDOW_BYTES)];
                check_sparse(&**file, extent, part.start, &mut report)?;
                extent.grain_bytes
            }
            PartKind::Flat { .. } | PartKind::Zero => part.length.max(1),
        };
        report.cluster_count += part.length.div_ceil(grain);
    }
    Ok(report)
}

fn check_sparse(file: &dyn ImageFile, extent: &SparseExtent, start: u64, report: &mut CheckReport) -> Result<()> {
    let file_bytes = file.length_bytes()?;
    // A bit for each grain of the file, by words.
    let unit = if extent.is_compressed {
        SECTOR_BYTES
    } else {
        extent.grain_bytes
    };
    let mut seen: HashMap<u64, u64> = HashMap::new();
    let metadata = extent.metadata(file)?;
    if has_overlap(&metadata) {
        let detail = "two of its tables are in one place, or one is in the header or the descriptor".to_owned();
        report.add(Severity::Corruption, ProblemKind::Structure { detail });
    }
    let mut tables = Vec::new();
    for_each_entry(file, (extent.directory, extent.table_count()), |number, entry| {
        let place = u64::from(u32::from_le_bytes(entry)) * SECTOR_BYTES;
        if place != 0 {
            tables.push((number, place));
        }
    })?;
    for (number, place) in tables {
        if place + extent.table_entries * 4 > file_bytes {
            report.add(
                Severity::Corruption,
                ProblemKind::Pointer {
                    what: "table of grains",
                    offset: place,
                },
            );
            continue;
        }
        for_each_entry(file, (place, extent.table_entries), |index, entry| {
            let sector = u32::from_le_bytes(entry);
            if sector == 0 || sector == 1 && extent.has_zero_grains {
                return;
            }
            let host = u64::from(sector) * SECTOR_BYTES;
            report.allocated_count += 1;
            report.compressed_count += u64::from(extent.is_compressed);
            report.image_end = report.image_end.max(host + extent.grain_bytes);
            if host >= file_bytes {
                report.add(
                    Severity::Corruption,
                    ProblemKind::Entry {
                        disk_offset: start + number * extent.table_coverage() + index * extent.grain_bytes,
                        detail: format!("its grain would be at {host}, past the end of the file"),
                    },
                );
                return;
            }
            let next = metadata.partition_point(|range| range.start <= host);
            let is_inside = next > 0 && metadata[next - 1].end > host;
            let is_over = metadata.get(next).is_some_and(|range| range.start < host + unit);
            if is_inside || is_over {
                report.add(
                    Severity::Corruption,
                    ProblemKind::Overlap {
                        offset: host,
                        first: "a table",
                        second: "a grain of the disk",
                    },
                );
            }
            let bit = host / unit;
            let word = seen.entry(bit / 64).or_default();
            if *word >> (bit % 64) & 1 == 1 {
                report.add(
                    Severity::Corruption,
                    ProblemKind::Overlap {
                        offset: host,
                        first: "one grain of the disk",
                        second: "another one",
                    },
                );
            }
            *word |= 1 << (bit % 64);
        })?;
    }
    Ok(())
}
