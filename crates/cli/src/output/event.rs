//! What `--progress json` writes to standard error: one JSON object per line; `docs/json.md` describes them.

use std::time::Duration;

use serde::Serialize;

use super::printable::printable_json;
use super::progress_line::ProgressLine;

/// An event of a running job.
#[derive(Serialize)]
#[serde(tag = "event", rename_all = "lowercase")]
pub(super) enum Event<'a> {
    Progress(ProgressEvent<'a>),
    Note {
        message: &'a str,
    },
    Warning {
        message: &'a str,
    },
    Log {
        elapsed_ms: u64,
        level: &'a str,
        target: &'a str,
        message: &'a str,
    },
    Error {
        causes: &'a [String],
        hint: Option<&'a str>,
    },
}

/// The progress of a job.
#[derive(Serialize)]
pub(super) struct ProgressEvent<'a> {
    phase: &'a str,
    unit: &'static str,
    done: u64,
    total: Option<u64>,
    per_second: Option<u64>,
    elapsed_ms: u64,
    left_ms: Option<u64>,
    bottleneck: Option<&'static str>,
    part: Option<usize>,
    part_count: Option<usize>,
}

fn milliseconds(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

impl<'a> From<&ProgressLine<'a>> for ProgressEvent<'a> {
    fn from(line: &ProgressLine<'a>) -> Self {
        Self {
            phase: line.phase,
            unit: match line.unit {
                holdfast_engine::Unit::Bytes => "bytes",
                holdfast_engine::Unit::Items => "items",
            },
            done: line.done,
            total: line.total,
            per_second: line.rate,
            elapsed_ms: milliseconds(line.elapsed),
            left_ms: line.left.map(milliseconds),
            bottleneck: line.bottleneck.map(holdfast_engine::Bottleneck::word),
            part: line.part.map(|part| part.number),
            part_count: line.part.map(|part| part.count),
        }
    }
}

impl<'a> Event<'a> {
    /// A line of the log, `elapsed` after the start of the program.
    pub(super) fn log(elapsed: Duration, level: &'a str, target: &'a str, message: &'a str) -> Self {
        Self::Log {
            elapsed_ms: milliseconds(elapsed),
            level,
            target,
            message,
        }
    }

    /// The line, without its end.
    pub(super) fn line(&self) -> String {
        printable_json(serde_json::to_string(self).unwrap_or_default())
    }
}
