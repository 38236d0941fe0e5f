//! Checks the block map.

use std::collections::HashMap;

use super::ZERO;
use super::header::VdiHeader;
use super::tables::for_each_number;
use crate::allocation_table::end_of_block;
use crate::file::ImageFile;
use crate::{CheckReport, ProblemKind, Result, Severity};

pub(crate) fn check(file: &dyn ImageFile, header: &VdiHeader) -> Result<CheckReport> {
    let file_bytes = file.length_bytes()?;
    let mut report = CheckReport {
        cluster_count: header.disk_bytes.div_ceil(header.block_bytes),
        image_end: header.data_offset,
        ..CheckReport::default()
    };
    let mut owners: HashMap<u32, u64> = HashMap::new();
    let mut next = 0;
    for_each_number(file, header, |index, entry| {
        if entry >= ZERO {
            return;
        }
        let host = header.host(entry);
        report.allocated_count += 1;
        next = next.max(entry + 1);
        if end_of_block(host, index, header.block_bytes, header.disk_bytes) > file_bytes {
            report.add(
                Severity::Corruption,
                ProblemKind::Pointer {
                    what: "block",
                    offset: host,
                },
            );
        }
        report.image_end = report.image_end.max(host + header.block_bytes);
        if owners.insert(entry, index).is_some() {
            report.add(
                Severity::Corruption,
                ProblemKind::Overlap {
                    offset: host,
                    first: "one block of the disk",
                    second: "another one",
                },
            );
        }
    })?;
    let room = file_bytes.saturating_sub(header.data_offset) / header.stride();
    check_count(header, next, room, &mut report);
    report.add_unreferenced(
        "blocks",
        room.min(header.block_count).saturating_sub(owners.len() as u64),
    );
    Ok(report)
}

/// Checks the stored block count against the last block number in use, and against the room in the file.
fn check_count(header: &VdiHeader, next: u32, room: u64, report: &mut CheckReport) {
    let count = u64::from(header.stored_count);
    let mut add = |severity, detail: String| {
        let detail = format!("the header counts {count} stored blocks, but {detail}");
        report.add(severity, ProblemKind::Structure { detail });
    };
    // VirtualBox stores the next block at this number.
    if header.stored_count < next {
        add(Severity::Corruption, format!("a block has the number {}", next - 1));
    } else if count > header.block_count {
        add(
            Severity::Corruption,
            format!(
                "the disk has {}: VirtualBox will not open the image",
                header.block_count
            ),
        );
    } else if count > room.max(next.into()) {
        add(Severity::Leak, format!("the file has space for {room}"));
    }
}
