//! How answers reach people and scripts.
//!
//! Standard output carries the answer and nothing else: text for people, or with `--json` exactly one document. What
//! happens on the way (progress, notes, warnings, errors) goes to standard error.

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

/// The answer of a verb: data first, printed for people or as JSON by the same code for all verbs.
///
/// Field names follow `docs/json.md`: units last (`size_bytes`, `duration_ms`), times as RFC 3339 text.
pub trait Report: serde::Serialize {
    /// The verb, as it is typed: `list`, `image info`.
    fn command(&self) -> &'static str;

    /// How it went, warnings apart.
    fn exit(&self) -> Exit {
        Exit::Ok
    }

    /// Whether it only confirms that something was done. With `--quiet`, such an answer is left out where all went well.
    fn is_confirmation(&self) -> bool {
        false
    }

    /// Writes it for people.
    fn human(&self, page: &mut Page);
}

/// What the answer is printed as.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// Text for people.
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
    /// Standard output that is a `kind`, in `format`, with or without colours.
    pub fn new(format: Format, kind: StreamKind, paint: Paint) -> Self {
        Self { format, kind, paint }
    }

    /// What the answer is printed as.
    pub fn format(&self) -> Format {
        self.format
    }

    /// Whether it shows colours.
    pub fn paint(&self) -> Paint {
        self.paint
    }

    /// The text of `report` as it goes to standard output.
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

    /// Writes bytes that are the answer themselves: a script, a disk.
    ///
    /// A reader that goes away early (`holdfast list | head`) has what it wanted: that is no error.
    pub fn data(&self, bytes: &[u8]) -> Result<(), Error> {
        let mut stdout = std::io::stdout().lock();
        match stdout.write_all(bytes).and_then(|()| stdout.flush()) {
            Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(Error::Stdout(error)),
            _ => Ok(()),
        }
    }

    /// Refuses `--json` for a verb whose answer is no report.
    pub fn refuse_json(&self, command: &'static str) -> Result<(), Error> {
        match self.format {
            Format::Human => Ok(()),
            Format::Json => Err(Error::NoJson { command }),
        }
    }
}
