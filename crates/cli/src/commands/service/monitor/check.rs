//! `monitor snapshots`, `health` and `capacity`: checks in the form that Nagios expects.
//!
//! Nagios reads only one line of standard output and the exit code. So errors are printed as such a line, with the
//! state UNKNOWN.

use holdfast_block::{error_messages, error_text};
use holdfast_engine::MonitorRequest;
use holdfast_policy::sanoid::{Check, Level};
use serde::Serialize;

use super::{WatchArgs, request};
use crate::context::Context;
use crate::context::sanoid_file;
use crate::exit::Exit;
use crate::output::{Page, Report, printable};

/// Report of a check.
#[derive(Debug, Serialize)]
struct MonitorChecked {
    #[serde(skip)]
    command: &'static str,
    #[serde(skip)]
    level: Level,
    line: String,
}

impl Report for MonitorChecked {
    fn command(&self) -> &'static str {
        self.command
    }

    fn exit(&self) -> Exit {
        Exit::Check(self.level)
    }

    fn human(&self, page: &mut Page) {
        page.line(&self.line);
    }
}

/// Runs a check.
pub(super) fn run(
    command: &'static str,
    args: &WatchArgs,
    ask: fn(&MonitorRequest<'_>) -> Check,
    context: &Context,
) -> Exit {
    let Check { level, line } = match sanoid_file::parse(&args.file) {
        Ok(config) => ask(&request(&args.limit.providers(context), &config)),
        Err(error) => Check::unknown(&error_text(&error)),
    };
    let reported = context.report(&MonitorChecked { command, level, line });
    reported.unwrap_or_else(|error| {
        context.console().error(&error_messages(&error), None);
        Exit::Check(Level::Unknown)
    })
}

/// The line for a check with an invalid command line.
pub fn unknown_line(reason: &str) -> String {
    format!("{}\n", printable(&Check::unknown(reason).line))
}
