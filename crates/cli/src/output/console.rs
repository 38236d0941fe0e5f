//! Standard error: messages, and below them at most one progress line that is redrawn.

use std::io::Write;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use log::Record;

use super::event::Event;
use super::table::cut;
use super::{Paint, ProgressLine, Style, printable};
use crate::process::log::LogSink;
use crate::process::terminal::StreamKind;

/// Maximum number of warnings that are kept for the report.
const KEPT_WARNING_COUNT_MAX: usize = 10_000;

/// Which messages are printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verbosity {
    /// Warnings and errors.
    Quiet,
    /// Also notes.
    Normal,
}

/// The form of messages and progress.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Messages {
    /// In words.
    Text,
    /// As JSON events, one per line.
    Events,
}

/// Standard error, shared by all parts of the program that print messages.
///
/// Writing never fails: without standard error, messages are lost and the job continues.
pub struct Console {
    kind: StreamKind,
    paint: Paint,
    verbosity: Verbosity,
    messages: Messages,
    state: Mutex<ConsoleState>,
}

struct ConsoleState {
    writer: Box<dyn Write + Send>,
    line_is_shown: bool,
    warnings: Vec<String>,
}

impl Console {
    /// A console that writes to `writer`, a stream of this `kind`.
    pub fn new(kind: StreamKind, paint: Paint, verbosity: Verbosity, writer: Box<dyn Write + Send>) -> Self {
        Self {
            kind,
            paint,
            verbosity,
            messages: Messages::Text,
            state: Mutex::new(ConsoleState {
                writer,
                line_is_shown: false,
                warnings: Vec::new(),
            }),
        }
    }

    /// Changes the form of messages and progress.
    #[must_use]
    pub fn with_messages(self, messages: Messages) -> Self {
        Self { messages, ..self }
    }

    /// The kind of stream.
    pub fn kind(&self) -> StreamKind {
        self.kind
    }

    /// Prints a note for the user.
    pub fn note(&self, message: &str) {
        if self.verbosity == Verbosity::Normal {
            self.answer(message);
        }
    }

    /// Prints the reply to a request, even if the program is quiet.
    pub fn answer(&self, message: &str) {
        let line = match self.messages {
            Messages::Text => format!("holdfast: {}", printable(message)),
            Messages::Events => Event::Note { message }.line(),
        };
        self.lock().message(&line);
    }

    /// Prints a warning, and keeps it for the report.
    pub fn warning(&self, message: &str) {
        let line = match self.messages {
            Messages::Text => {
                let label = self.paint.paint(Style::Warning, "warning:");
                format!("holdfast: {label} {}", printable(message))
            }
            Messages::Events => Event::Warning { message }.line(),
        };
        let mut state = self.lock();
        state.message(&line);
        // A long-running server must not keep them all.
        if state.warnings.len() < KEPT_WARNING_COUNT_MAX {
            state.warnings.push(message.to_owned());
        }
    }

    /// Prints why something failed, from the outermost to the innermost cause, and the hint.
    pub fn error(&self, chain: &[String], hint: Option<&str>) {
        if self.messages == Messages::Events {
            let line = Event::Error { causes: chain, hint }.line();
            return self.lock().message(&line);
        }
        let text = format!("holdfast: {}", printable(&chain.join(": ")));
        let mut state = self.lock();
        state.message(&self.paint.paint(Style::Bad, &text));
        if let Some(hint) = hint {
            state.message(&format!("hint: {}", printable(hint)));
        }
    }

    /// Prints complete, safe lines without any prefix.
    pub fn text(&self, text: &str) {
        let text = text.trim_end();
        match self.messages {
            Messages::Text => self.lock().message(text),
            Messages::Events => self.lock().message(&Event::Note { message: text }.line()),
        }
    }

    /// Redraws the progress line on a terminal; in a file it becomes a separate line.
    pub fn progress(&self, line: &ProgressLine<'_>) {
        let mut state = self.lock();
        match (self.messages, self.kind) {
            (Messages::Events, _) => state.message(&Event::Progress(line.into()).line()),
            (Messages::Text, StreamKind::File) => state.message(&format!("holdfast: {}", printable(&line.in_full()))),
            // The last column stays free: some terminals wrap as soon as it is written.
            (Messages::Text, StreamKind::Terminal { width }) => {
                let width = width.saturating_sub(1);
                let line = cut(&printable(&line.fit(width)), width);
                state.write(&format!("\r{line}\x1b[K"));
                state.line_is_shown = true;
            }
        }
    }

    /// Removes the progress line.
    pub fn clear_progress(&self) {
        self.lock().clear();
    }

    /// All warnings so far.
    pub fn warnings(&self) -> Vec<String> {
        self.lock().warnings.clone()
    }

    fn lock(&self) -> MutexGuard<'_, ConsoleState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl LogSink for Console {
    fn log(&self, elapsed: Duration, record: &Record<'_>) {
        let level = record.level().as_str().to_lowercase();
        let (target, message) = (record.target(), record.args().to_string());
        let seconds = elapsed.as_secs_f64();
        let line = match self.messages {
            Messages::Text => format!("holdfast: {seconds:.3} {level}: {target}: {}", printable(&message)),
            Messages::Events => Event::log(elapsed, &level, target, &message).line(),
        };
        self.lock().message(&line);
    }
}

impl ConsoleState {
    fn message(&mut self, line: &str) {
        self.clear();
        self.write(&format!("{line}\n"));
    }

    fn clear(&mut self) {
        if std::mem::take(&mut self.line_is_shown) {
            self.write("\r\x1b[K");
        }
    }

    fn write(&mut self, text: &str) {
        // A failure cannot be reported here.
        self.writer.write_all(text.as_bytes()).ok();
        self.writer.flush().ok();
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::io::Write;
    use std::sync::{Arc, Mutex};
    use std::time::Duration;

    use holdfast_engine::Unit;

    use super::{Console, Messages, Verbosity};
    use crate::output::{Paint, ProgressLine};
    use crate::process::log::LogSink as _;
    use crate::process::terminal::StreamKind;

    /// The output of a console.
    #[derive(Clone, Default)]
    pub(crate) struct Written(Arc<Mutex<Vec<u8>>>);

    impl Written {
        pub(crate) fn take(&self) -> String {
            String::from_utf8(std::mem::take(&mut *self.0.lock().unwrap())).unwrap()
        }
    }

    impl Write for Written {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    pub(crate) fn console(kind: StreamKind, verbosity: Verbosity) -> (Console, Written) {
        let written = Written::default();
        let console = Console::new(kind, Paint::Plain, verbosity, Box::new(written.clone()));
        (console, written)
    }

    fn line(phase: &str) -> ProgressLine<'_> {
        ProgressLine {
            part: None,
            phase,
            unit: Unit::Items,
            done: 3,
            total: Some(4),
            rate: None,
            elapsed: Duration::from_millis(1500),
            left: None,
            bottleneck: None,
        }
    }

    /// With `--json` every line of standard error is JSON.
    #[test]
    fn programs_get_events() {
        let (console, written) = console(StreamKind::Terminal { width: 12 }, Verbosity::Normal);
        let console = console.with_messages(Messages::Events);
        console.progress(&line("reading \u{1b} vda"));
        console.note("a full read is necessary");
        console.text("two\nlines\n");
        console.warning("odd\n");
        let record = log::Record::builder()
            .level(log::Level::Debug)
            .target("holdfast_host")
            .args(format_args!("runs zfs"))
            .build();
        console.log(Duration::from_millis(1500), &record);
        console.error(&["open x".to_owned(), "gone".to_owned()], Some("look elsewhere"));
        console.clear_progress();
        assert_eq!(
            written.take().lines().collect::<Vec<_>>(),
            [
                r#"{"event":"progress","phase":"reading \u001b vda","unit":"items","done":3,"total":4,"per_second":null,"elapsed_ms":1500,"left_ms":null,"bottleneck":null,"part":null,"part_count":null}"#,
                r#"{"event":"note","message":"a full read is necessary"}"#,
                r#"{"event":"note","message":"two\nlines"}"#,
                r#"{"event":"warning","message":"odd\n"}"#,
                r#"{"event":"log","elapsed_ms":1500,"level":"debug","target":"holdfast_host","message":"runs zfs"}"#,
                r#"{"event":"error","causes":["open x","gone"],"hint":"look elsewhere"}"#,
            ]
        );
        assert_eq!(console.warnings(), ["odd\n"]);
    }

    #[test]
    fn a_message_takes_the_place_of_the_line_of_progress() {
        let (console, written) = console(StreamKind::Terminal { width: 12 }, Verbosity::Normal);
        console.progress(&line("half done, more to come"));
        assert_eq!(written.take(), "\rhalf done,…\x1b[K");
        console.warning("odd\n");
        assert_eq!(written.take(), "\r\x1b[Kholdfast: warning: odd\\n\n");
        console.clear_progress();
        assert_eq!(written.take(), "");
        assert_eq!(console.warnings(), ["odd\n"]);
    }

    #[test]
    fn quiet_keeps_warnings_and_errors() {
        let (console, written) = console(StreamKind::File, Verbosity::Quiet);
        console.note("a full read is necessary");
        assert_eq!(written.take(), "");
        console.error(&["open x".to_owned(), "gone".to_owned()], Some("look elsewhere"));
        assert_eq!(written.take(), "holdfast: open x: gone\nhint: look elsewhere\n");
    }

    /// A closed standard error must not end a backup.
    #[test]
    fn nothing_fails_when_standard_error_is_closed() {
        struct Closed;
        impl Write for Closed {
            fn write(&mut self, _bytes: &[u8]) -> std::io::Result<usize> {
                Err(std::io::ErrorKind::BrokenPipe.into())
            }
            fn flush(&mut self) -> std::io::Result<()> {
                Err(std::io::ErrorKind::BrokenPipe.into())
            }
        }
        let console = Console::new(StreamKind::File, Paint::Plain, Verbosity::Normal, Box::new(Closed));
        console.warning("x");
        assert_eq!(console.warnings(), ["x"]);
    }
}
