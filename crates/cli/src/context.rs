//! What a verb gets: options, environment, and the ways to ask, to show and to answer.

use std::ffi::OsString;
use std::sync::{Arc, OnceLock};

use holdfast_block::{Clock, SystemClock};
use holdfast_engine::Interrupt;
use jiff::tz::TimeZone;

use crate::args::GlobalArgs;
use crate::environment::Environment;
use crate::errors::Error;
use crate::exit::Exit;
use crate::interrupt::{Listener, listen};
use crate::output::{
    Console, Format, Output, Paint, ProgressDisplay, Report, RunningProgress, ShowProgress, Verbosity,
};
use crate::password::{Password, PasswordSource, PasswordUse};
use crate::terminal::{ControllingTerminal, StreamKind};

/// The world as a verb sees it.
pub struct Context {
    global: GlobalArgs,
    environment: Environment,
    output: Output,
    console: Arc<Console>,
    clock: Arc<dyn Clock>,
    zone: TimeZone,
    listener: OnceLock<Listener>,
}

impl Context {
    /// The world of this process.
    pub fn of_process(global: GlobalArgs, environment: Environment) -> Self {
        let args = &global.output;
        let stdout = StreamKind::of_stdout(&std::io::stdout());
        let stderr = StreamKind::of_stderr(&std::io::stderr());
        let format = if args.json { Format::Json } else { Format::Human };
        let verbosity = if args.quiet {
            Verbosity::Quiet
        } else {
            Verbosity::Normal
        };
        let output = Output::new(format, stdout, Paint::choose(args.color, &environment, stdout));
        let paint = Paint::choose(args.color, &environment, stderr);
        let console = Console::new(stderr, paint, verbosity, Box::new(std::io::stderr()));
        Self {
            global,
            environment,
            output,
            console: Arc::new(console),
            clock: Arc::new(SystemClock::new()),
            zone: TimeZone::system(),
            listener: OnceLock::new(),
        }
    }

    /// Standard output.
    pub fn output(&self) -> &Output {
        &self.output
    }

    /// Standard error.
    pub fn console(&self) -> &Console {
        &self.console
    }

    /// The program's clock.
    pub fn clock(&self) -> &Arc<dyn Clock> {
        &self.clock
    }

    /// The time zone in which times are read and shown.
    pub fn zone(&self) -> &TimeZone {
        &self.zone
    }

    /// Where the repository is.
    pub fn repository(&self) -> Result<OsString, Error> {
        self.global.repository.location(&self.environment)
    }

    /// The password of the repository, from wherever it is to come.
    pub fn password(&self, password_use: PasswordUse) -> Result<Password, Error> {
        let source = PasswordSource::choose(&self.global.repository.password, &self.environment)?;
        let mut warn = |message: &str| self.console.warning(message);
        Ok(source.read(password_use, &ControllingTerminal, &mut warn)?)
    }

    /// A listener for a job, which shows its progress as the options say until it is dropped.
    ///
    /// To be dropped before [`report`](Self::report).
    pub fn progress(&self) -> RunningProgress {
        let args = &self.global.output;
        let show = if args.quiet || args.no_progress {
            ShowProgress::No
        } else {
            ShowProgress::Yes
        };
        ProgressDisplay::start(Arc::clone(&self.console), Arc::clone(&self.clock), show)
    }

    /// Makes Ctrl-C a request to stop, which the job looks at; to be called when the job begins.
    ///
    /// Once the job has ended with `Interrupted`, the program ends by the signal that asked for it.
    pub fn interrupt(&self) -> Result<Interrupt, Error> {
        if let Some(listener) = self.listener.get() {
            return Ok(listener.interrupt().clone());
        }
        let listener = listen().map_err(Error::Signals)?;
        Ok(self.listener.get_or_init(|| listener).interrupt().clone())
    }

    /// The signal that asked the job to stop.
    pub fn signal(&self) -> Option<i32> {
        self.listener.get().and_then(Listener::signal)
    }

    /// Prints the answer of a verb.
    pub fn report(&self, report: &impl Report) -> Result<Exit, Error> {
        let warnings = self.console.warnings();
        let exit = report.exit().with_warning_count(warnings.len());
        let text = self.output.render(report, exit, &warnings)?;
        self.output.data(text.as_bytes())?;
        Ok(exit)
    }
}
