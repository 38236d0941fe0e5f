//! Holding footers, table and bitmaps against the file.

use super::footer::Header;
use super::sparse::SparseHeader;
use super::tables::for_each_sector;
use super::{FREE, SECTOR_BYTES};
use crate::file::ImageFile;
use crate::{CheckReport, ProblemKind, Result, Severity};

fn structure(report: &mut CheckReport, severity: Severity, detail: &str) {
    let detail = detail.to_owned();
    report.add(severity, ProblemKind::Structure { detail });
}

/// Checks the image in `file`.
pub(crate) fn check(file: &dyn ImageFile, header: &Header) -> Result<CheckReport> {
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
        if copy != header.footer_bytes {
            structure(
                &mut report,
                Severity::Corruption,
                "the copy of the footer at the start differs from it",
            );
        }
    } else {
        // What a program leaves that is killed while the image grows: nothing is lost.
        structure(
            &mut report,
            Severity::Leak,
            "there is no footer at the end; its copy at the start is whole",
        );
    }
    if header.is_footer_short {
        structure(&mut report, Severity::Leak, SHORT);
    }
    check_table(file, header.footer_start(file_bytes), sparse, &mut report)?;
    Ok(report)
}

const SHORT: &str = "the footer has 511 bytes, as old versions of Virtual PC wrote it: not every program knows that";

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
    for pair in starts.windows(2) {
        if pair[1] - pair[0] < whole {
            report.add(
                Severity::Corruption,
                ProblemKind::Overlap {
                    offset: pair[1],
                    first: "one block of the disk",
                    second: "another one",
                },
            );
        }
    }
    report.image_end = starts.last().map_or(sparse.tables_end, |last| last + whole);
    // Room between blocks that is less than one is where they are aligned.
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
