//! `monitor snapshots`, `health` and `capacity`: checks as Nagios calls them.
//!
//! Their callers read one line of standard output and the exit code, and nothing else. So each error is such a line, and
//! unknown.

use holdfast_block::{error_messages, error_text};
use holdfast_engine::MonitorRequest;
use holdfast_policy::sanoid::{Check, Level};
use serde::Serialize;

use super::{WatchArgs, request};
use crate::context::Context;
use crate::context::sanoid_file;
use crate::exit::Exit;
use crate::output::{Page, Report, printable};

/// What a check answers.
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

/// Checks.
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

/// The line of a check that did not even begin, since its command line makes no sense.
pub fn unknown_line(reason: &str) -> String {
    format!("{}\n", printable(&Check::unknown(reason).line))
}
