//! Checks the cluster table.

use std::collections::HashSet;

use super::header::PloopHeader;
use super::tables::for_each_cluster;
use crate::allocation_table::end_of_block;
use crate::file::ImageFile;
use crate::{CheckReport, ProblemKind, Result, Severity};

pub(crate) fn check(file: &dyn ImageFile, header: &PloopHeader) -> Result<CheckReport> {
    let file_bytes = file.length_bytes()?;
    let cluster = header.cluster_bytes;
    let mut report = CheckReport {
        cluster_count: header.disk_bytes.div_ceil(cluster),
        image_end: header.data_offset,
        ..CheckReport::default()
    };
    if header.is_open {
        let detail = "it was not closed cleanly, or is open".to_owned();
        report.add(Severity::Leak, ProblemKind::Structure { detail });
    }
    let mut seen = HashSet::new();
    for_each_cluster(file, header, |index, host| {
        report.allocated_count += 1;
        let is_aligned = host.wrapping_sub(header.data_offset).is_multiple_of(cluster);
        let is_there = end_of_block(host, index, cluster, header.disk_bytes) <= file_bytes;
        if host < header.data_offset || !is_there || !is_aligned {
            let kind = ProblemKind::Pointer {
                what: "cluster",
                offset: host,
            };
            report.add(Severity::Corruption, kind);
        }
        report.image_end = report.image_end.max(host + cluster);
        if !seen.insert(host) {
            let kind = ProblemKind::Overlap {
                offset: host,
                first: "one cluster of the disk",
                second: "another one",
            };
            report.add(Severity::Corruption, kind);
        }
    })?;
    let room = file_bytes.saturating_sub(header.data_offset) / cluster;
    report.add_unreferenced("clusters", room.saturating_sub(seen.len() as u64));
    Ok(report)
}
