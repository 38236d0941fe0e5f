//! The report of `live-copy`, with its table of times.

use std::time::Duration;

use holdfast_live_copy::{Forecast, LiveCopyReport, SourceConsistency};
use serde::Serialize;

use super::super::copy_target::CopyTarget;
use crate::output::{Column, Page, Report, Table};
use crate::units;

/// How the source was held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CopiedFrom {
    /// Nothing wrote to it: it was locked.
    AtRest,
    /// Nothing may have written to it, which was not checked.
    Unlocked,
    /// A snapshot was copied, for which writes waited before the copy began.
    Snapshot {
        /// How long.
        waited: Duration,
    },
    /// It was frozen for the last pass.
    Frozen,
}

/// The report of `live-copy`.
#[derive(Debug, Serialize)]
pub(super) struct LiveCopied {
    dry_run: bool,
    #[serde(skip)]
    from: CopiedFrom,
    source: String,
    target: String,
    format: &'static str,
    size_bytes: u64,
    /// Bytes over the connection.
    sent_bytes: u64,
    /// What these would be without compression.
    uncompressed_bytes: u64,
    /// Bytes that were zero.
    zero_bytes: u64,
    consistency: &'static str,
    /// Whether an earlier command had completed the copy.
    was_complete: bool,
    lost_connections: u32,
    rounds: Vec<RoundDocument>,
    times: TimesDocument,
    duration_ms: u64,
}

#[derive(Debug, Serialize)]
struct RoundDocument {
    round: u32,
    sent_bytes: u64,
    duration_us: u64,
    dirty_bytes: u64,
    predicted_frozen_us: u64,
}

/// The frozen time with its parts, and the phases.
#[derive(Debug, Serialize)]
struct TimesDocument {
    frozen_us: u64,
    freeze_us: u64,
    last_pass_us: u64,
    last_bytes: u64,
    seal_us: u64,
    receiver_sync_us: u64,
    receiver_journal_us: u64,
    phases: Vec<PhaseDocument>,
}

#[derive(Debug, Serialize)]
struct PhaseDocument {
    phase: &'static str,
    duration_us: u64,
}

impl From<&Forecast> for RoundDocument {
    fn from(forecast: &Forecast) -> Self {
        Self {
            round: forecast.round,
            sent_bytes: forecast.measured.sent_bytes,
            duration_us: units::micros(forecast.measured.took),
            dirty_bytes: forecast.measured.dirty_bytes,
            predicted_frozen_us: units::micros(forecast.frozen),
        }
    }
}

impl LiveCopied {
    pub(super) fn new(
        source: &str,
        target: &CopyTarget,
        report: &LiveCopyReport,
        consistency: SourceConsistency,
        from: CopiedFrom,
    ) -> Self {
        // Otherwise nothing was frozen by the copy itself, although the steps took time.
        let frozen = match from {
            CopiedFrom::AtRest | CopiedFrom::Unlocked => Duration::ZERO,
            CopiedFrom::Snapshot { waited } => waited,
            CopiedFrom::Frozen => report.handover.frozen,
        };
        let handover = &report.handover;
        let phases = report.phases.iter().map(|time| PhaseDocument {
            phase: time.phase.word(),
            duration_us: units::micros(time.duration),
        });
        Self {
            dry_run: false,
            from,
            source: source.to_owned(),
            target: target.to_string(),
            format: target.format.name(),
            size_bytes: report.size_bytes,
            sent_bytes: report.sent_bytes,
            uncompressed_bytes: report.plain_bytes,
            zero_bytes: report.zero_bytes,
            consistency: consistency.word(),
            was_complete: report.was_complete,
            lost_connections: report.lost_connection_count,
            rounds: report.rounds.iter().map(RoundDocument::from).collect(),
            times: TimesDocument {
                frozen_us: units::micros(frozen),
                freeze_us: units::micros(handover.freeze),
                last_pass_us: units::micros(handover.last_pass),
                last_bytes: handover.last_bytes,
                seal_us: units::micros(handover.seal),
                receiver_sync_us: units::micros(handover.receiver.flush),
                receiver_journal_us: units::micros(handover.receiver.journal),
                phases: phases.collect(),
            },
            duration_ms: units::millis(report.duration),
        }
    }
}

impl Report for LiveCopied {
    fn command(&self) -> &'static str {
        "live-copy"
    }

    fn is_confirmation(&self) -> bool {
        true
    }

    fn human(&self, page: &mut Page) {
        if self.was_complete {
            page.line(&format!("{} was already complete", self.target));
            return;
        }
        let duration = Duration::from_millis(self.duration_ms);
        let mut parts = vec![
            format!("{} disk", units::bytes(self.size_bytes)),
            sent(self.sent_bytes, self.uncompressed_bytes),
            units::duration(duration),
        ];
        parts.extend(units::rate(self.sent_bytes, duration).map(units::bytes_per_second));
        page.line(&format!("{}  {}", self.target, parts.join(", ")));
        let mut table = Table::new([Column::text("PHASE"), Column::number("TIME")]);
        for phase in &self.times.phases {
            table.row([phase.phase.to_owned(), milliseconds(phase.duration_us)]);
        }
        page.table(&table);
        page.line(&match self.from {
            CopiedFrom::AtRest => "nothing was frozen: the source was not written".to_owned(),
            CopiedFrom::Unlocked => "nothing was frozen, and the source could not be locked".to_owned(),
            CopiedFrom::Snapshot { .. } => format!(
                "a snapshot before the copy: writes waited for {}",
                milliseconds(self.times.frozen_us)
            ),
            CopiedFrom::Frozen => format!(
                "frozen for {}: {} to freeze, {} for the last {}",
                milliseconds(self.times.frozen_us),
                milliseconds(self.times.freeze_us),
                milliseconds(self.times.last_pass_us),
                units::bytes(self.times.last_bytes),
            ),
        });
    }
}

/// What was sent, and what it was before compression.
fn sent(sent_bytes: u64, uncompressed_bytes: u64) -> String {
    let sent = format!("{} sent", units::bytes(sent_bytes));
    if uncompressed_bytes == sent_bytes {
        return sent;
    }
    format!("{sent} for {} of data", units::bytes(uncompressed_bytes))
}

/// Milliseconds with a fraction: most phases are short.
#[expect(clippy::cast_precision_loss, reason = "a time for people")]
fn milliseconds(micros: u64) -> String {
    format!("{:.1} ms", micros as f64 / 1000.0)
}

/// The report of `live-copy --dry-run`.
#[derive(Debug, Serialize)]
pub(super) struct LiveCopyPlanned {
    pub(super) dry_run: bool,
    pub(super) source: String,
    pub(super) target: String,
    pub(super) format: &'static str,
    pub(super) size_bytes: u64,
    /// None for a container.
    pub(super) data_bytes: Option<u64>,
    /// None for a container: it depends on whether its file system can be frozen.
    pub(super) consistency: Option<&'static str>,
}

impl Report for LiveCopyPlanned {
    fn command(&self) -> &'static str {
        "live-copy"
    }

    fn human(&self, page: &mut Page) {
        let data = self
            .data_bytes
            .map(|bytes| format!(", {} of data", units::bytes(bytes)));
        page.line(&format!(
            "would copy {} to {}  {}: {} disk{}",
            self.source,
            self.target,
            self.format,
            units::bytes(self.size_bytes),
            data.unwrap_or_default()
        ));
    }
}
