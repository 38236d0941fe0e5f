//! Checks footers, block table and bitmaps.

use std::ops::Range;

use holdfast_block::to_usize;

use super::header::VhdHeader;
use super::sparse::SparseHeader;
use super::tables::for_each_sector;
use super::{FREE, SECTOR_BYTES};
use crate::file::ImageFile;
use crate::model::info::ImageKind;
use crate::{CheckReport, ProblemKind, Result, Severity};

fn structure(report: &mut CheckReport, severity: Severity, detail: &str) {
    let detail = detail.to_owned();
    report.add(severity, ProblemKind::Structure { detail });
}

pub(crate) fn check(file: &dyn ImageFile, header: &VhdHeader) -> Result<CheckReport> {
    let file_bytes = file.length_bytes()?;
    let Some(sparse) = &header.sparse else {
        let sectors = header.footer.disk_bytes().div_ceil(SECTOR_BYTES);
        let mut report = CheckReport {
            cluster_count: sectors,
            allocated_count: sectors,
            image_end: file_bytes,
            ..CheckReport::default()
        };
        if header.is_footer_short {
            structure(&mut report, Severity::Leak, SHORT);
        }
        return Ok(report);
    };
    let mut report = CheckReport {
        cluster_count: header.footer.disk_bytes().div_ceil(sparse.block_bytes),
        ..CheckReport::default()
    };
    if header.has_footer_at_end {
        let mut copy = vec![0; header.footer_bytes.len()];
        file.read_at(&mut copy, 0)?;
        if copy != *header.footer_bytes {
            structure(
                &mut report,
                Severity::Corruption,
                "the footer and its copy at the start differ",
            );
        }
    } else {
        // A program was killed while the image grew: no data is lost.
        structure(
            &mut report,
            Severity::Leak,
            "the footer at the end is missing; its copy at the start is valid",
        );
    }
    if header.is_footer_short {
        structure(&mut report, Severity::Leak, SHORT);
    }
    let room_end = header.footer_start(file_bytes);
    check_table(file, room_end, sparse, &mut report)?;
    // In a differencing image, unmarked sectors belong to the parent.
    if header.footer.kind != ImageKind::Differencing {
        check_unmarked(file, room_end, sparse, &mut report)?;
    }
    Ok(report)
}

/// Reports blocks that have data but no marked sector: they read as zero here, and as data in other programs.
fn check_unmarked(file: &dyn ImageFile, room_end: u64, sparse: &SparseHeader, report: &mut CheckReport) -> Result<()> {
    let mut starts = Vec::new();
    for_each_sector(file, sparse, |sector| {
        if sector != FREE {
            starts.push(u64::from(sector) * SECTOR_BYTES);
        }
    })?;
    let (bitmap_bytes, block_bytes) = (sparse.bitmap_bytes(), sparse.block_bytes);
    let mut count = 0_u64;
    for start in starts
        .iter()
        .filter(|start| start.saturating_add(bitmap_bytes) <= room_end)
    {
        let end = (start + bitmap_bytes + block_bytes).min(room_end);
        if is_zero(file, *start..start + bitmap_bytes)? && !is_zero(file, start + bitmap_bytes..end)? {
            count += 1;
        }
    }
    if count > 0 {
        let detail = format!(
            "{count} blocks have data, but no sector is marked in their bitmaps: they are read as zeroes here, and as data by other programs"
        );
        structure(report, Severity::Corruption, &detail);
    }
    Ok(())
}

fn is_zero(file: &dyn ImageFile, range: Range<u64>) -> Result<bool> {
    const BYTES_AT_ONCE: u64 = 64 << 10;
    let mut at = range.start;
    while at < range.end {
        let mut bytes = vec![0; to_usize(BYTES_AT_ONCE.min(range.end - at))];
        file.read_at(&mut bytes, at)?;
        if bytes.iter().any(|byte| *byte != 0) {
            return Ok(false);
        }
        at += bytes.len() as u64;
    }
    Ok(true)
}

const SHORT: &str = "the footer has 511 bytes, as in old versions of Virtual PC: not every program supports that";

fn check_table(file: &dyn ImageFile, room_end: u64, sparse: &SparseHeader, report: &mut CheckReport) -> Result<()> {
    let whole = sparse.bitmap_bytes() + sparse.block_bytes;
    let mut starts = Vec::new();
    for_each_sector(file, sparse, |sector| {
        if sector == FREE {
            return;
        }
        let start = u64::from(sector) * SECTOR_BYTES;
        report.allocated_count += 1;
        if start < sparse.tables_end || start + whole > room_end {
            report.add(
                Severity::Corruption,
                ProblemKind::Pointer {
                    what: "block",
                    offset: start,
                },
            );
        }
        starts.push(start);
    })?;
    starts.sort_unstable();
    for (first, second) in starts.iter().zip(starts.iter().skip(1)) {
        if second - first < whole {
            report.add(
                Severity::Corruption,
                ProblemKind::Overlap {
                    offset: *second,
                    first: "one block of the disk",
                    second: "another one",
                },
            );
        }
    }
    report.image_end = starts.last().map_or(sparse.tables_end, |last| last + whole);
    // A gap smaller than a block is alignment.
    let starts_and_end = starts.iter().copied().chain([room_end]);
    let mut free = sparse.tables_end;
    let mut unused = 0;
    for start in starts_and_end {
        unused += start.saturating_sub(free) / whole;
        free = free.max(start.saturating_add(whole));
    }
    report.add_unreferenced("blocks", unused);
    Ok(())
}
