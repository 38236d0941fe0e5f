//! Output to users and scripts.
//!
//! Standard output carries only the report: text for users, or with `--json` exactly one document. Progress, notes,
//! warnings and errors go to standard error.

mod console;
mod document;
mod event;
pub mod finding;
mod page;
mod printable;
mod progress;
mod progress_line;
pub mod prometheus;
pub mod snapshot;
mod style;
mod table;

use std::io::{ErrorKind, Write};

pub use console::{Console, Messages, Verbosity};
pub use document::{SCHEMA, error_document, report_document};
pub use page::Page;
pub use printable::printable;
pub use progress::{ProgressDisplay, RateWindow, RunningProgress, ShowProgress};
pub use progress_line::{Part, ProgressLine};
pub use style::{Paint, Style};
pub use table::{Align, Column, Table};

use crate::errors::Error;
use crate::exit::Exit;
use crate::process::terminal::StreamKind;

/// The report of a verb: data that is printed as text or as JSON by the same code for all verbs.
///
/// Field names follow `docs/json.md`: units last (`size_bytes`, `duration_ms`), times as RFC 3339 text.
pub trait Report: serde::Serialize {
    /// The verb, as it is typed: `list`, `image info`.
    fn command(&self) -> &'static str;

    /// The exit code, apart from warnings.
    fn exit(&self) -> Exit {
        Exit::Ok
    }

    /// Whether the report only confirms that something was done. With `--quiet`, such a report is omitted after
    /// success.
    fn is_confirmation(&self) -> bool {
        false
    }

    /// Writes the report as text.
    fn human(&self, page: &mut Page);
}

/// The format of reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// Text for users.
    Human,
    /// One JSON document.
    Json,
}

/// Standard output.
#[derive(Debug, Clone, Copy)]
pub struct Output {
    format: Format,
    kind: StreamKind,
    paint: Paint,
}

impl Output {
    /// Standard output of this `kind` and `format`, with or without colours.
    pub fn new(format: Format, kind: StreamKind, paint: Paint) -> Self {
        Self { format, kind, paint }
    }

    /// The format of reports.
    pub fn format(&self) -> Format {
        self.format
    }

    /// Whether colours are used.
    pub fn paint(&self) -> Paint {
        self.paint
    }

    /// The text of `report` for standard output.
    pub fn render<R: Report + ?Sized>(&self, report: &R, exit: Exit, warnings: &[String]) -> Result<String, Error> {
        match self.format {
            Format::Human => {
                let mut page = Page::new(self.kind.width(), self.paint);
                report.human(&mut page);
                Ok(page.into_text())
            }
            Format::Json => report_document(report, exit, warnings),
        }
    }

    /// Writes raw output: a script, a disk.
    ///
    /// A reader that closes the pipe early (`holdfast list | head`) is not an error.
    pub fn data(&self, bytes: &[u8]) -> Result<(), Error> {
        let mut stdout = std::io::stdout().lock();
        match stdout.write_all(bytes).and_then(|()| stdout.flush()) {
            Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(Error::Stdout(error)),
            _ => Ok(()),
        }
    }

    /// Returns an error if `--json` is used with a verb that has no report.
    pub fn refuse_json(&self, command: &'static str) -> Result<(), Error> {
        match self.format {
            Format::Human => Ok(()),
            Format::Json => Err(Error::NoJson { command }),
        }
    }
}
