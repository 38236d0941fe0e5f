//! Checks the block allocation table.

use super::MIB;
use super::header::{RedundantStructure, broken_copies};
use super::opened::OpenedVhdx;
use super::tables::{bits_end, block_end, block_of, for_each_block, is_of_bits, state};
use crate::{CheckReport, ProblemKind, Result, Severity};

pub(crate) fn check(opened: &OpenedVhdx) -> Result<CheckReport> {
    let metadata = &opened.metadata;
    let broken = broken_copies(&*opened.file)?;
    let file_bytes = opened.file.length_bytes()?;
    let mut report = CheckReport {
        cluster_count: metadata.block_count(),
        ..CheckReport::default()
    };
    for structure in broken {
        let detail = match structure {
            RedundantStructure::Header => "one of its two headers is damaged; the other one is used",
            RedundantStructure::Regions => "its two region tables differ; the first valid one is used",
        };
        let detail = detail.to_owned();
        report.add(Severity::Leak, ProblemKind::Structure { detail });
    }
    let mut used: Vec<(u64, u64, &'static str)> = vec![(0, MIB, "the headers")];
    let mut cut_off = Vec::new();
    let bat_bytes = opened.bat.length_bytes.next_multiple_of(MIB);
    used.push((opened.bat.offset, bat_bytes, "the table of blocks"));
    used.push((opened.header.log_offset, opened.header.log_bytes.into(), "the log"));
    let mut partial = Vec::new();
    let mut bits = Vec::new();
    for_each_block(&*opened.file, opened.bat, metadata, |number, entry| {
        if is_of_bits(metadata, number) {
            if metadata.has_parent && entry.state() == state::BITS_PRESENT {
                bits.push(number);
                if entry.offset() < file_bytes && bits_end(metadata, number, entry) > file_bytes {
                    cut_off.push(("sector bitmap", entry.offset()));
                }
                used.push((entry.offset(), MIB, "sector bitmap"));
            }
            return;
        }
        let mut wrong = |detail: String| {
            let disk_offset = disk_offset(opened, number);
            report.add(Severity::Corruption, ProblemKind::Entry { disk_offset, detail });
        };
        if entry.has_reserved() {
            wrong("reserved bits are set".to_owned());
        }
        match entry.state() {
            state::FULL | state::PARTIAL => {
                report.allocated_count += 1;
                used.push((entry.offset(), metadata.block_bytes, "a block"));
                if entry.offset() < file_bytes && block_end(metadata, number, entry) > file_bytes {
                    cut_off.push(("a block", entry.offset()));
                }
                if entry.state() == state::PARTIAL {
                    partial.push(number);
                }
            }
            state::NOT_PRESENT | state::UNDEFINED | state::ZERO | state::UNMAPPED => {}
            other => wrong(format!("its state is {other}")),
        }
    })?;
    for number in partial {
        check_partial(opened, number, &bits, &mut report);
    }
    for (what, offset) in cut_off {
        report.add(Severity::Corruption, ProblemKind::Pointer { what, offset });
    }
    check_places(&mut used, file_bytes, &mut report);
    Ok(report)
}

pub(super) fn disk_offset(opened: &OpenedVhdx, number: u64) -> u64 {
    block_of(&opened.metadata, number) * opened.metadata.block_bytes
}

/// Checks block `number`, which is partially present; `bits` are the sector bitmaps that are stored.
fn check_partial(opened: &OpenedVhdx, number: u64, bits: &[u64], report: &mut CheckReport) {
    let chunk = opened.metadata.chunk_blocks() + 1;
    let of_bits = number / chunk * chunk + chunk - 1;
    let detail = if !opened.metadata.has_parent {
        "it is partially present, but there is no parent"
    } else if bits.binary_search(&of_bits).is_err() {
        "it is partially present, but its sector bitmap is missing"
    } else {
        return;
    };
    report.add(
        Severity::Corruption,
        ProblemKind::Entry {
            disk_offset: disk_offset(opened, number),
            detail: detail.to_owned(),
        },
    );
}

fn check_places(used: &mut [(u64, u64, &'static str)], file_bytes: u64, report: &mut CheckReport) {
    used.sort_unstable_by_key(|(start, ..)| *start);
    let mut end = 0;
    let mut last = "";
    for (start, length, what) in used.iter().copied() {
        if start < MIB && start != 0 || start >= file_bytes || start.checked_add(length).is_none() {
            report.add(Severity::Corruption, ProblemKind::Pointer { what, offset: start });
            continue;
        }
        if start < end {
            report.add(
                Severity::Corruption,
                ProblemKind::Overlap {
                    offset: start,
                    first: last,
                    second: what,
                },
            );
        }
        (end, last) = (end.max(start + length), what);
    }
    report.image_end = end;
}
