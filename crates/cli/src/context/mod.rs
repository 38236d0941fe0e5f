//! The context of a verb: options, environment, output, and prompts.

pub mod activation;
pub mod holdfast_file;
pub mod mounts;
pub mod password;
mod repository;
pub mod sanoid_file;
pub mod search_path;
pub mod server_process;
pub mod service;
pub mod standard_streams;

use std::ffi::OsStr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use holdfast_block::{Clock, SystemClock};
use holdfast_engine::{Interrupt, Interrupted, Job};
use holdfast_policy::config::ConfiguredPool;
use jiff::tz::TimeZone;

use crate::args::LuksArgs;
use crate::args::{CommandLine, GlobalArgs, NewPasswordArgs, OutputArgs, PoolArgs, ProgressHow, RepositoryArgs};
use crate::context::password::{Password, PasswordSource, PasswordUse};
use crate::errors::{Error, PasswordError};
use crate::exit::Exit;
use crate::output::{
    Console, Format, Messages, Output, Paint, Part, ProgressDisplay, Report, RunningProgress, ShowProgress, Verbosity,
};
use crate::process::environment::{self, Environment};
use crate::process::interrupt::{Listener, ProgressRequests, end_when_stuck, listen};
use crate::process::log;
use crate::process::terminal::{ControllingTerminal, StreamKind};

const TIME_ZONE: &str = "TZ";
/// State folder of root.
const STATE_OF_ROOT: &str = "/var/lib/holdfast/runs";

/// The time zone of this process; UTC, with a warning, if the environment names an unknown one.
fn time_zone(environment: &Environment, console: &Console) -> TimeZone {
    let zone = TimeZone::system();
    match environment.get(TIME_ZONE).map(OsStr::to_string_lossy) {
        Some(name) if !name.is_empty() && zone.is_unknown() => {
            console.warning(&format!(
                "TZ names no time zone that is known here, {name}: times are those of UTC"
            ));
            TimeZone::UTC
        }
        _ => zone,
    }
}

/// The environment in which a verb runs.
pub struct Context {
    global: GlobalArgs,
    environment: Environment,
    output: Output,
    console: Arc<Console>,
    clock: Arc<dyn Clock>,
    zone: TimeZone,
    listener: OnceLock<Listener>,
    requests: ProgressRequests,
    part: Mutex<Option<Part>>,
    line: &'static CommandLine,
}

impl Context {
    /// The context of this process.
    pub fn of_process(
        global: GlobalArgs,
        environment: Environment,
        requests: ProgressRequests,
        line: &'static CommandLine,
    ) -> Self {
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
        let messages = match args.progress {
            ProgressHow::Json => Messages::Events,
            ProgressHow::Auto | ProgressHow::None => Messages::Text,
        };
        let console = Console::new(stderr, paint, verbosity, Box::new(std::io::stderr())).with_messages(messages);
        let zone = time_zone(&environment, &console);
        Self {
            global,
            environment,
            output,
            console: Arc::new(console),
            clock: Arc::new(SystemClock::new()),
            zone,
            listener: OnceLock::new(),
            requests,
            part: Mutex::default(),
            line,
        }
    }

    /// A context for background queries: with this repository, without notes, warnings and progress.
    #[must_use]
    pub fn silent(&self, repository: RepositoryArgs) -> Self {
        let console = Console::new(
            StreamKind::File,
            Paint::Plain,
            Verbosity::Quiet,
            Box::new(std::io::sink()),
        );
        Self {
            global: GlobalArgs {
                repository,
                output: OutputArgs {
                    quiet: true,
                    ..OutputArgs::default()
                },
            },
            environment: self.environment.clone(),
            output: self.output,
            console: Arc::new(console),
            clock: Arc::clone(&self.clock),
            zone: self.zone.clone(),
            listener: OnceLock::new(),
            requests: self.requests.clone(),
            part: Mutex::default(),
            line: self.line,
        }
    }

    /// The definition of the command line.
    pub fn command_line(&self) -> &'static CommandLine {
        self.line
    }

    /// Standard output.
    pub fn output(&self) -> &Output {
        &self.output
    }

    /// Standard error.
    pub fn console(&self) -> &Console {
        &self.console
    }

    /// Standard error, shared with other threads.
    pub fn shared_console(&self) -> Arc<Console> {
        Arc::clone(&self.console)
    }

    /// Whether notes are suppressed.
    pub fn is_quiet(&self) -> bool {
        self.global.output.quiet
    }

    /// Whether more detail is requested.
    pub fn is_verbose(&self) -> bool {
        self.global.output.verbose > 0
    }

    /// Starts logging if it is requested.
    pub fn begin_log(&self) -> Result<(), Error> {
        let sink: Arc<Console> = Arc::clone(&self.console);
        log::begin(
            self.global.output.verbose,
            &self.environment,
            sink,
            Arc::clone(&self.clock),
        )
        .map_err(|problem| {
            Error::usage(
                problem,
                "write levels or modules with levels: debug, holdfast_repo=trace",
            )
        })
    }

    /// Sets the current one of several machines, for the progress display.
    pub fn begin_part(&self, part: Part) {
        *self.part.lock().unwrap_or_else(PoisonError::into_inner) = Some(part);
    }

    /// A folder for sockets and pipes.
    pub fn runtime_folder(&self) -> PathBuf {
        let is_usable = |folder: &PathBuf| rustix::fs::access(folder, rustix::fs::Access::WRITE_OK).is_ok();
        let found = self.runtime_folders().into_iter().find(is_usable);
        found.unwrap_or_else(|| "/tmp".into())
    }

    /// All folders in which processes of this user may have sockets: a service has another environment than a login.
    pub fn runtime_folders(&self) -> Vec<PathBuf> {
        let of_user = self.variable(environment::RUNTIME_FOLDER).map(PathBuf::from);
        of_user.into_iter().chain(["/run".into(), "/tmp".into()]).collect()
    }

    /// The folder of the journal of runs; `None` if there is no place for it.
    pub fn journal_folder(&self) -> Option<PathBuf> {
        let folder = |name| self.variable(name).map(PathBuf::from);
        if let Some(state) = folder(environment::STATE_FOLDER) {
            return Some(state.join("holdfast/runs"));
        }
        if rustix::process::geteuid().is_root() {
            return Some(STATE_OF_ROOT.into());
        }
        folder(environment::HOME).map(|home| home.join(".local/state/holdfast/runs"))
    }

    /// The value of an environment variable.
    pub fn variable(&self, name: &str) -> Option<&OsStr> {
        self.environment.get(name)
    }

    /// The program's clock.
    pub fn clock(&self) -> &Arc<dyn Clock> {
        &self.clock
    }

    /// The time zone for parsing and printing times.
    pub fn zone(&self) -> &TimeZone {
        &self.zone
    }

    /// The configuration folder of the current user, if known.
    pub fn configuration_folder(&self) -> Option<PathBuf> {
        let folder = |name: &str| self.variable(name).map(PathBuf::from).filter(|path| path.is_absolute());
        let own = || Some(folder(environment::HOME)?.join(".config"));
        folder(environment::CONFIGURATION_FOLDER).or_else(own)
    }

    /// Runs an interruptible job with progress display on the given number of threads.
    pub fn work<T>(
        &self,
        thread_count: usize,
        work: impl FnOnce(Job<'_>) -> holdfast_engine::Result<T>,
    ) -> Result<T, Error> {
        let interrupt = self.interrupt()?;
        let progress = self.progress();
        let done = work(Job {
            progress: &*progress,
            interrupt: &interrupt,
            clock: &*self.clock,
            thread_count,
        });
        // An interrupted job may report the interruption as an error of what it read.
        match done {
            Err(error) if says_interrupted(&error) => Err(holdfast_engine::Error::from(Interrupted).into()),
            done => Ok(done?),
        }
    }

    /// The password of a pool's user; holdfast.toml may give its source.
    pub fn pool_password(&self, args: &PoolArgs, configured: Option<&ConfiguredPool>) -> Result<Password, Error> {
        let is_given = args.pool_password_file.is_some() || args.pool_password_command.is_some();
        let configured = configured
            .filter(|_| !is_given)
            .and_then(holdfast_file::password_of_pool);
        let source = match configured {
            Some(source) => source,
            None => PasswordSource::choose_of_pool(args, &self.environment)?,
        };
        if source == PasswordSource::Prompt && self.variable(environment::JOB).is_some() {
            return Err(PasswordError::NoTerminalForPool.into());
        }
        let mut warn = |message: &str| self.console.warning(message);
        let read = source.read(PasswordUse::Pool, &ControllingTerminal, &mut warn);
        Ok(read.map_err(|error| match error {
            PasswordError::NoTerminal => PasswordError::NoTerminalForPool,
            other => other,
        })?)
    }

    /// The passphrase of encrypted volumes of guests.
    pub fn luks_password(&self, args: &LuksArgs) -> Result<Password, Error> {
        let source = PasswordSource::choose_of_luks(args, &self.environment)?;
        let mut warn = |message: &str| self.console.warning(message);
        Ok(source.read(PasswordUse::Luks, &ControllingTerminal, &mut warn)?)
    }

    /// A new password, in addition to the one that opens the repository.
    pub fn new_password(&self, args: &NewPasswordArgs) -> Result<Password, Error> {
        let mut warn = |message: &str| self.console.warning(message);
        let read = PasswordSource::choose_new(args).read(PasswordUse::New, &ControllingTerminal, &mut warn);
        Ok(read.map_err(|error| match error {
            PasswordError::NoTerminal => PasswordError::NoTerminalForNew,
            other => other,
        })?)
    }

    /// The password of the repository.
    pub fn password(&self, password_use: PasswordUse) -> Result<Password, Error> {
        let source = self.password_source()?;
        if source == PasswordSource::Prompt && self.variable(environment::JOB).is_some() {
            // A scheduler started this process; it must not use the scheduler's terminal.
            return Err(PasswordError::NoTerminal.into());
        }
        let mut warn = |message: &str| self.console.warning(message);
        Ok(source.read(password_use, &ControllingTerminal, &mut warn)?)
    }

    /// How the options require progress to be shown.
    pub fn progress_how(&self) -> ProgressHow {
        let args = &self.global.output;
        if args.no_progress {
            ProgressHow::None
        } else {
            args.progress
        }
    }

    /// A listener for a job. It shows progress as the options require, until it is dropped.
    ///
    /// Must be dropped before [`report`](Self::report).
    pub fn progress(&self) -> RunningProgress {
        let show = match self.progress_how() {
            ProgressHow::Json => ShowProgress::Events,
            ProgressHow::Auto if !self.is_quiet() => ShowProgress::Line,
            ProgressHow::Auto | ProgressHow::None => ShowProgress::No,
        };
        let (console, clock) = (Arc::clone(&self.console), Arc::clone(&self.clock));
        let part = *self.part.lock().unwrap_or_else(PoisonError::into_inner);
        ProgressDisplay::new(console, clock, show, self.requests.clone())
            .of_part(part)
            .start()
    }

    /// Turns Ctrl-C into a stop request that the job checks; to be called when the job begins.
    ///
    /// When a job ends with `Interrupted`, the program ends itself with the signal that requested the stop.
    pub fn interrupt(&self) -> Result<Interrupt, Error> {
        if let Some(listener) = self.listener.get() {
            return Ok(listener.interrupt().clone());
        }
        let listener = listen().map_err(Error::Signals)?;
        let console = self.shared_console();
        let warn = move |subject: &str| {
            console.clear_progress();
            console.error(
                &[format!(
                    "interrupted; {subject} does not answer, and the program ends without clearing up"
                )],
                Some("a machine is looked after by its watchdog; `holdfast doctor` shows what else is left"),
            );
        };
        end_when_stuck(&listener, Arc::clone(&self.clock), warn).map_err(Error::Signals)?;
        Ok(self.listener.get_or_init(|| listener).interrupt().clone())
    }

    /// A function that returns whether a signal requested a stop. Before a job begins, a signal ends the program
    /// directly.
    pub fn stop_question(&self) -> Arc<dyn Fn() -> bool + Send + Sync> {
        match self.listener.get() {
            Some(listener) => listener.interrupt().question(),
            None => Arc::new(|| false),
        }
    }

    /// The signal that requested the stop.
    pub fn signal(&self) -> Option<i32> {
        self.listener.get().and_then(Listener::signal)
    }

    /// Prints the report of a verb.
    pub fn report(&self, report: &impl Report) -> Result<Exit, Error> {
        let warnings = self.console.warnings();
        let exit = report.exit().with_warning_count(warnings.len());
        let is_asked_for = !self.is_quiet() || self.output.format() == Format::Json;
        if is_asked_for || exit != Exit::Ok || !report.is_confirmation() {
            let text = self.output.render(report, exit, &warnings)?;
            self.output.data(text.as_bytes())?;
        }
        Ok(exit)
    }
}

/// Whether an interruption is in the chain of causes of an error.
fn says_interrupted(error: &(dyn std::error::Error + 'static)) -> bool {
    // `source` of an I/O error does not return the error that it wraps.
    let held = error.downcast_ref::<std::io::Error>().and_then(std::io::Error::get_ref);
    error.is::<Interrupted>()
        || held.is_some_and(|held| says_interrupted(held))
        || error.source().is_some_and(says_interrupted)
}
