//! The report of `replicate`.

use std::time::Duration;

use holdfast_replicate::{ReplicaOutcome, ReplicateReport, ReplicatedDataset, ReplicatedStream};
use jiff::Timestamp;
use serde::Serialize;

use crate::exit::Exit;
use crate::output::{Column, Page, Report, Style, Table};
use crate::units;

/// The kind of the report.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ReplicatedShown {
    /// What was sent.
    Done,
    /// What would be sent.
    Plan,
    /// A comparison of both sides.
    Status,
}

/// The report of `replicate`.
#[derive(Debug, Serialize)]
pub(super) struct ReplicateDone {
    #[serde(skip)]
    shown: ReplicatedShown,
    dry_run: bool,
    datasets: Vec<ReplicatedDatasetDocument>,
}

#[derive(Debug, Serialize)]
struct ReplicatedDatasetDocument {
    source: String,
    target: String,
    outcome: &'static str,
    /// The problem and its solution; null if there is none.
    reason: Option<String>,
    advice: Option<String>,
    newest_here: Option<SentSnapshot>,
    newest_there: Option<SentSnapshot>,
    common: Option<String>,
    behind_count: usize,
    behind_ms: Option<u64>,
    resumable: bool,
    streams: Vec<StreamDocument>,
    notes: Vec<String>,
}

#[derive(Debug, Serialize)]
struct SentSnapshot {
    name: String,
    time: String,
}

#[derive(Debug, Serialize)]
struct StreamDocument {
    base: Option<String>,
    to: Option<String>,
    snapshot_count: usize,
    resumed: bool,
    stream_bytes: Option<u64>,
    link_bytes: Option<u64>,
}

impl From<ReplicatedStream> for StreamDocument {
    fn from(stream: ReplicatedStream) -> Self {
        Self {
            base: stream.base,
            to: stream.to,
            snapshot_count: stream.count,
            resumed: stream.is_resumed,
            stream_bytes: stream.stream_bytes,
            link_bytes: stream.link_bytes,
        }
    }
}

impl StreamDocument {
    fn line(&self) -> String {
        let what = match (&self.base, &self.to) {
            (_, Some(to)) if self.resumed => format!("the rest of {to}"),
            (Some(base), Some(to)) => format!("{base} to {to}"),
            (None, Some(to)) => format!("all of {to}"),
            (_, None) => "the rest of what was cut".to_owned(),
        };
        let count = match self.snapshot_count {
            0 | 1 => String::new(),
            count => format!(", {}", units::counted(count as u64, "snapshot", "snapshots")),
        };
        let bytes = self.stream_bytes.map(|bytes| format!(", {}", units::bytes(bytes)));
        let link = self
            .link_bytes
            .filter(|link| self.stream_bytes.is_some_and(|bytes| link + link / 8 < bytes));
        let link = link.map(|bytes| format!(" ({} on the way)", units::bytes(bytes)));
        format!("{what}{count}{}{}", bytes.unwrap_or_default(), link.unwrap_or_default())
    }
}

impl ReplicatedDatasetDocument {
    fn new(done: ReplicatedDataset) -> Self {
        let snapshot = |(name, time_s): (String, i64)| {
            let time = Timestamp::from_second(time_s).unwrap_or_default();
            SentSnapshot {
                name,
                time: time.to_string(),
            }
        };
        let (outcome, reason, advice) = match done.outcome {
            ReplicaOutcome::UpToDate => ("up to date", None, None),
            ReplicaOutcome::Sent => ("sent", None, None),
            ReplicaOutcome::Planned => ("behind", None, None),
            ReplicaOutcome::Nothing => ("nothing to send", None, None),
            ReplicaOutcome::Diverged { reason, advice } => ("diverged", Some(reason), Some(advice)),
            ReplicaOutcome::Busy => (
                "busy",
                Some("another run is replicating to it".to_owned()),
                Some("it ends by itself; this run may begin then".to_owned()),
            ),
            ReplicaOutcome::Failed(reason) => ("failed", Some(reason), None),
        };
        Self {
            source: done.source,
            target: done.target,
            outcome,
            reason,
            advice,
            newest_here: done.newest_here.map(snapshot),
            newest_there: done.newest_there.map(snapshot),
            common: done.common,
            behind_count: done.behind_count,
            behind_ms: done
                .behind_s
                .map(|seconds| u64::try_from(seconds).unwrap_or_default().saturating_mul(1000)),
            resumable: done.is_resumable,
            streams: done.streams.into_iter().map(StreamDocument::from).collect(),
            notes: done.notes,
        }
    }

    fn row(&self) -> [String; 7] {
        let name = |snapshot: &Option<SentSnapshot>| {
            let snapshot = snapshot.as_ref();
            snapshot.map(|snapshot| snapshot.name.clone()).unwrap_or_default()
        };
        let behind = self.behind_ms.map(|millis| match millis {
            0 => "0 s".to_owned(),
            millis => units::duration(Duration::from_millis(millis)),
        });
        [
            self.source.clone(),
            name(&self.newest_here),
            name(&self.newest_there),
            self.common.clone().unwrap_or_default(),
            units::count(self.behind_count as u64),
            behind.unwrap_or_default(),
            match (self.resumable, self.outcome) {
                (true, _) => "interrupted, resumable".to_owned(),
                (_, outcome) => outcome.to_owned(),
            },
        ]
    }

    fn show_problems(&self, page: &mut Page) {
        if let Some(reason) = &self.reason {
            let style = if self.outcome == "busy" {
                Style::Warning
            } else {
                Style::Bad
            };
            page.styled(style, &format!("{}: {reason}", self.source));
        }
        if let Some(advice) = &self.advice {
            page.line(&format!("  {advice}"));
        }
        for note in &self.notes {
            page.styled(Style::Warning, &format!("{}: {note}", self.source));
        }
    }
}

impl ReplicateDone {
    pub(super) fn new(report: ReplicateReport, shown: ReplicatedShown) -> Self {
        let documents = report.datasets.into_iter().map(ReplicatedDatasetDocument::new);
        Self {
            shown,
            dry_run: shown != ReplicatedShown::Done,
            datasets: documents.collect(),
        }
    }

    fn table(&self, page: &mut Page) {
        let mut table = Table::new([
            Column::long_text("DATASET"),
            Column::long_text("NEWEST HERE"),
            Column::long_text("NEWEST THERE"),
            Column::long_text("COMMON"),
            Column::number("BEHIND"),
            Column::text("BY"),
            Column::text("STATE"),
        ]);
        for dataset in &self.datasets {
            table.row(dataset.row());
        }
        page.table(&table);
    }
}

impl Report for ReplicateDone {
    fn command(&self) -> &'static str {
        "replicate"
    }

    fn is_confirmation(&self) -> bool {
        !self.dry_run
    }

    fn exit(&self) -> Exit {
        if self.shown == ReplicatedShown::Status {
            return Exit::Ok;
        }
        let is = |outcome: &str| self.datasets.iter().any(|dataset| dataset.outcome == outcome);
        let has_notes = self.datasets.iter().any(|dataset| !dataset.notes.is_empty());
        match () {
            () if is("failed") || is("diverged") => Exit::Error,
            () if is("busy") => Exit::Locked,
            () if has_notes => Exit::Warnings,
            () => Exit::Ok,
        }
    }

    fn human(&self, page: &mut Page) {
        if self.shown == ReplicatedShown::Status {
            self.table(page);
            page.gap();
        } else {
            for dataset in &self.datasets {
                let verb = if self.dry_run { "would send" } else { "sent" };
                for stream in &dataset.streams {
                    page.line(&format!(
                        "{verb} {} -> {}: {}",
                        dataset.source,
                        dataset.target,
                        stream.line()
                    ));
                }
                match dataset.outcome {
                    "up to date" => page.line(&format!("{} is up to date", dataset.target)),
                    "nothing to send" => page.line(&format!("{} has no snapshot to send", dataset.source)),
                    _ => {}
                }
            }
        }
        for dataset in &self.datasets {
            dataset.show_problems(page);
        }
    }
}
