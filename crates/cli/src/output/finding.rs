//! Problems of a repository, as shown in reports.

use holdfast_repo::{Finding, FindingKind, TouchedDisk};
use jiff::Timestamp;
use serde::Serialize;

use crate::exit::Exit;
use crate::output::{Page, Style};
use crate::units;

/// Number of problems printed as text; documents list all of them.
const SHOWN_MAX: usize = 20;
/// Number of ranges of a disk printed for a problem.
const SHOWN_RANGES_MAX: usize = 8;

/// The word for data that could not be read for lack of permission.
const REFUSED: &str = "refused";

/// A finding in a document.
#[derive(Debug, Serialize)]
pub struct MonitorFinding {
    object: String,
    offset: Option<u64>,
    kind: &'static str,
    is_damage: bool,
    detail: String,
    touches: Vec<TouchedDocument>,
}

#[derive(Debug, Serialize)]
struct TouchedDocument {
    id: String,
    machine: String,
    time: String,
    disk: String,
    bytes: u64,
    /// Pairs of first byte and end, limited to the first ones.
    ranges: Vec<[u64; 2]>,
    unlisted_range_count: u64,
}

impl From<&Finding> for MonitorFinding {
    fn from(finding: &Finding) -> Self {
        Self {
            object: finding.object.clone(),
            offset: finding.offset,
            kind: word(finding.kind),
            is_damage: finding.kind.is_damage(),
            detail: finding.detail.clone(),
            touches: finding.touches.iter().map(TouchedDocument::from).collect(),
        }
    }
}

impl From<&TouchedDisk> for TouchedDocument {
    fn from(touched: &TouchedDisk) -> Self {
        let time = Timestamp::from_millisecond(touched.time_ms).unwrap_or(Timestamp::MIN);
        Self {
            id: touched.snapshot.to_string(),
            machine: touched.machine.clone(),
            time: time.to_string(),
            disk: touched.disk.clone(),
            bytes: touched.bytes,
            ranges: touched.ranges.iter().map(|range| [range.start, range.end]).collect(),
            unlisted_range_count: touched.unlisted_range_count,
        }
    }
}

/// The word for a kind in documents; it never changes.
fn word(kind: FindingKind) -> &'static str {
    match kind {
        FindingKind::Damaged => "damaged",
        FindingKind::Missing => "missing",
        FindingKind::Unreadable => "unreadable",
        FindingKind::Obstructed => "obstructed",
        FindingKind::Refused => REFUSED,
        FindingKind::LaterVersion => "later-version",
        FindingKind::Differs => "differs",
        FindingKind::Unlisted => "unlisted",
        FindingKind::Dangling => "dangling",
        FindingKind::Single => "single",
        FindingKind::Stranger => "stranger",
        _ => "other",
    }
}

/// The exit code for these problems: damage if stored data is lost or wrong, otherwise warnings if there are any.
pub fn exit(findings: &[MonitorFinding], unlisted_count: u64) -> Exit {
    if unlisted_count > 0 || findings.iter().any(|finding| finding.is_damage) {
        Exit::Damage
    } else if findings.iter().any(|finding| finding.kind == REFUSED) {
        Exit::Error
    } else if findings.is_empty() {
        Exit::Ok
    } else {
        Exit::Warnings
    }
}

/// Prints the problems and the disks they affect.
pub fn show(findings: &[MonitorFinding], unlisted_count: u64, page: &mut Page) {
    for finding in findings.iter().take(SHOWN_MAX) {
        let offset = finding
            .offset
            .map(|offset| format!(" at byte {offset}"))
            .unwrap_or_default();
        let style = if finding.is_damage { Style::Bad } else { Style::Warning };
        page.styled(
            style,
            &format!("{}: {}{offset}: {}", finding.kind, finding.object, finding.detail),
        );
        for touched in &finding.touches {
            let disk = if touched.disk.is_empty() {
                "all of it".to_owned()
            } else {
                format!("disk {}, {}", touched.disk, units::bytes(touched.bytes))
            };
            page.line(&format!(
                "  affects snapshot {} of {}: {disk}",
                &touched.id[..8],
                touched.machine
            ));
            for [start, end] in touched.ranges.iter().take(SHOWN_RANGES_MAX) {
                page.line(&format!("    bytes {start} to {end}"));
            }
            let more = touched.ranges.len().saturating_sub(SHOWN_RANGES_MAX) as u64 + touched.unlisted_range_count;
            if more > 0 {
                page.line(&format!("    and {} more ranges", units::count(more)));
            }
        }
    }
    let more = findings.len().saturating_sub(SHOWN_MAX) as u64 + unlisted_count;
    if more > 0 {
        page.line(&format!("and {} more", units::count(more)));
    }
    if findings.iter().any(|finding| finding.kind == REFUSED) {
        page.line("what is refused was not checked: run this as the user that owns the repository, or as root");
    }
}
