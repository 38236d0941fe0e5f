//! What a verb gets: options, environment, and the ways to ask, to show and to answer.

pub mod holdfast_file;
pub mod password;
pub mod sanoid_file;
pub mod search_path;
pub mod service;
pub mod standard_streams;

use std::ffi::{OsStr, OsString};
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use holdfast_block::{Clock, SystemClock};
use holdfast_engine::{Interrupt, Interrupted, Job, Location, Protection, Unlock, check_sighting, protection};
use holdfast_policy::config::ConfiguredPool;
use holdfast_repo::key::SystemRandomness;
use holdfast_repo::{Repository, Surroundings, SystemProcesses};
use jiff::tz::TimeZone;

use crate::args::PoolArgs;
use crate::args::{CommandLine, GlobalArgs, NewPasswordArgs, ToPasswordArgs};
use crate::context::password::{Password, PasswordSource, PasswordUse};
use crate::errors::Error;
use crate::errors::PasswordError;
use crate::exit::Exit;
use crate::output::{
    Console, Format, Output, Paint, ProgressDisplay, Report, RunningProgress, ShowProgress, Verbosity,
};
use crate::process::environment::{self, Environment};
use crate::process::interrupt::{Listener, ProgressRequests, end_when_stuck, listen};
use crate::process::terminal::{ControllingTerminal, StreamKind};
use crate::process::time;

const TIME_ZONE: &str = "TZ";
/// Where root keeps what programs keep from run to run.
const STATE_OF_ROOT: &str = "/var/lib/holdfast/runs";

/// The time zone of this process; UTC, with a warning, where the environment names one that there is not.
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

/// The world as a verb sees it.
pub struct Context {
    global: GlobalArgs,
    environment: Environment,
    output: Output,
    console: Arc<Console>,
    clock: Arc<dyn Clock>,
    zone: TimeZone,
    listener: OnceLock<Listener>,
    requests: ProgressRequests,
    line: &'static CommandLine,
}

impl Context {
    /// The world of this process.
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
        let console = Console::new(stderr, paint, verbosity, Box::new(std::io::stderr()));
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
            line,
        }
    }

    /// The command line that the program understands.
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

    /// Standard error, for other threads.
    pub fn shared_console(&self) -> Arc<Console> {
        Arc::clone(&self.console)
    }

    /// Whether only answers, warnings and errors are wanted.
    pub fn is_quiet(&self) -> bool {
        self.global.output.quiet
    }

    /// A folder for sockets and pipes.
    pub fn runtime_folder(&self) -> PathBuf {
        let of_user = self.variable(environment::RUNTIME_FOLDER).map(PathBuf::from);
        let folders = of_user.into_iter().chain(["/run".into()]);
        let is_usable = |folder: &PathBuf| rustix::fs::access(folder, rustix::fs::Access::WRITE_OK).is_ok();
        folders.into_iter().find(is_usable).unwrap_or_else(|| "/tmp".into())
    }

    /// The folder of the journal of runs; none where there is no place for it.
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

    /// A variable of the environment.
    pub fn variable(&self, name: &str) -> Option<&OsStr> {
        self.environment.get(name)
    }

    /// The program's clock.
    pub fn clock(&self) -> &Arc<dyn Clock> {
        &self.clock
    }

    /// The time zone in which times are read and shown.
    pub fn zone(&self) -> &TimeZone {
        &self.zone
    }

    /// The folder for configurations of the user that we are, where that is known.
    pub fn configuration_folder(&self) -> Option<PathBuf> {
        let folder = |name: &str| self.variable(name).map(PathBuf::from).filter(|path| path.is_absolute());
        let own = || Some(folder(environment::HOME)?.join(".config"));
        folder(environment::CONFIGURATION_FOLDER).or_else(own)
    }

    /// Does a job that shows how far it is and that can be interrupted, on so many threads.
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
        // Who was asked to stop may say so as an error of what he read.
        match done {
            Err(error) if says_interrupted(&error) => Err(holdfast_engine::Error::from(Interrupted).into()),
            done => Ok(done?),
        }
    }

    /// Whether the command line names a repository; the environment may name one for all commands.
    pub fn is_repository_named(&self) -> bool {
        self.global.repository.repository.is_some()
    }

    /// Where the repository is: a path, or what holdfast.toml says of a name.
    pub fn repository(&self) -> Result<OsString, Error> {
        let word = self.global.repository.location(&self.environment)?;
        let configured = holdfast_file::repository(&word, self)?;
        Ok(configured.map_or(word, |repository| repository.path.into()))
    }

    /// Where the password of the repository comes from: what an option says, else what holdfast.toml says of a repository that is named,
    /// else what is left.
    fn password_source(&self) -> Result<PasswordSource, Error> {
        let args = &self.global.repository.password;
        if args.password_file.is_none() && args.password_command.is_none() {
            let word = self.global.repository.location(&self.environment)?;
            if let Some(source) = holdfast_file::password_of(&word, self)? {
                return Ok(source);
            }
        }
        Ok(PasswordSource::choose(args, &self.environment)?)
    }

    /// Whether the password is given for just this repository: by an option, in holdfast.toml, or as the password itself. A file or command of the
    /// environment is often set for all that a user or service does.
    pub fn is_password_of_this_repository(&self) -> Result<bool, Error> {
        let args = &self.global.repository.password;
        let is_said = self.variable(environment::PASSWORD).is_some();
        if is_said || args.password_file.is_some() || args.password_command.is_some() {
            return Ok(true);
        }
        let word = self.global.repository.location(&self.environment)?;
        Ok(holdfast_file::password_of(&word, self)?.is_some())
    }

    /// What the repository needs from the world beside its store.
    pub fn surroundings(&self) -> Surroundings {
        Surroundings {
            randomness: Arc::new(SystemRandomness),
            processes: Arc::new(SystemProcesses),
            now_ms: Arc::new(|| time::now().as_millisecond()),
        }
    }

    /// Where the repository is.
    ///
    /// # Errors
    /// A word that is neither a path that is there, nor a name in holdfast.toml.
    pub fn location(&self) -> Result<Location, Error> {
        let word = self.global.repository.location(&self.environment)?;
        let location = self.new_location()?;
        if holdfast_file::may_be_name(&word) && !location.path().exists() {
            let config = holdfast_file::path(self);
            let name = word.display().to_string();
            return Err(Error::NoRepositoryOfName { name, config });
        }
        Ok(location)
    }

    /// Where the repository is, which need not be there yet.
    pub fn new_location(&self) -> Result<Location, Error> {
        let location = self.remembered(Location::parse(&self.repository()?)?);
        Ok(location.with_key_slot(self.global.repository.password.key_slot))
    }

    /// A location with what this host remembers of it: which key slot opened, and which repository it is.
    pub fn remembered(&self, location: Location) -> Location {
        let memory = self
            .journal_folder()
            .and_then(|runs| Some(runs.parent()?.join("slots")));
        location.with_slot_memory(memory.as_deref())
    }

    /// The repository, opened; asks for its password if it needs one.
    pub fn open_repository(&self) -> Result<Repository, Error> {
        let location = self.location()?;
        let password = self.unlocking_password(&location)?;
        self.open_with(&location, password.as_ref())
    }

    /// The repository at `location`, opened with its password.
    pub fn open_with(&self, location: &Location, password: Option<&Password>) -> Result<Repository, Error> {
        let unlock = password.map_or(Unlock::Nothing, |password| Unlock::Password(password.as_bytes()));
        let repository = holdfast_engine::open(location, unlock, &self.surroundings(), &*self.progress())?;
        let seen = password.map_or(Protection::Open, |_| Protection::Encrypted);
        let accepted = self.variable(environment::ACCEPT_REPOSITORY).and_then(OsStr::to_str);
        check_sighting(location, &repository, seen, accepted, &*self.progress())?;
        self.warn_of_damage_of(&repository);
        Ok(repository)
    }

    /// The repository at `location`, opened with its key by a process that another one of ours has started: that has looked at what it is.
    pub fn open_by_key(&self, location: &Location, key: &Password) -> Result<Repository, Error> {
        let unlock = Unlock::Password(key.as_bytes());
        let repository = holdfast_engine::open(location, unlock, &self.surroundings(), &*self.progress())?;
        self.warn_of_damage_of(&repository);
        Ok(repository)
    }

    fn warn_of_damage_of(&self, repository: &Repository) {
        let console = Arc::clone(&self.console);
        repository.warn_of_damage(move |message| console.warning(&format!("{message}; run holdfast repair")));
    }

    /// The password that opens the repository at `location`; none where it asks for none.
    ///
    /// A password that an option gives is used in any case: who can write to the store could have made the repository look open. A
    /// file or command of the environment may be there for other repositories.
    pub fn unlocking_password(&self, location: &Location) -> Result<Option<Password>, Error> {
        let source = self.password_source()?;
        if source == PasswordSource::Prompt && protection(location)? == Protection::Open {
            return Ok(None);
        }
        if !self.is_password_of_this_repository()? && protection(location)? == Protection::Open {
            self.console
                .note("the repository has no password; the one in the environment is not used");
            return Ok(None);
        }
        self.password(PasswordUse::Existing).map(Some)
    }

    /// Another repository than the one that the program works on, opened; asks for its password if it needs one. `options` are those
    /// that give it.
    pub fn open_other(
        &self,
        location: &Location,
        source: &PasswordSource,
        options: &'static str,
    ) -> Result<Repository, Error> {
        if *source == PasswordSource::Prompt && protection(location)? == Protection::Open {
            return self.open_with(location, None);
        }
        let mut warn = |message: &str| self.console.warning(message);
        let read = source.read(PasswordUse::Other, &ControllingTerminal, &mut warn);
        let password = read.map_err(|error| match error {
            PasswordError::NoTerminal => PasswordError::NoTerminalForOther { options },
            other => other,
        })?;
        self.open_with(location, Some(&password))
    }

    /// Where snapshots are copied to: the option, else the environment.
    pub fn other_location(&self, option: Option<&OsStr>) -> Result<Location, Error> {
        let location = option.or_else(|| self.variable(environment::TO_REPOSITORY));
        let missing = || {
            let hint = format!("give --to LOCATION, or set {}", environment::TO_REPOSITORY);
            Error::usage("no repository is given to copy to", hint)
        };
        let word = location.ok_or_else(missing)?;
        let location = match holdfast_file::repository(word, self)? {
            Some(repository) => Location::parse(OsStr::new(&repository.path))?,
            None => Location::parse(word)?,
        };
        Ok(self.remembered(location))
    }

    /// Where the password of the repository comes from that is copied to.
    pub fn password_to(&self, to: Option<&OsStr>, args: &ToPasswordArgs) -> Result<PasswordSource, Error> {
        if args.to_password_file.is_none()
            && args.to_password_command.is_none()
            && let Some(word) = to.or_else(|| self.variable(environment::TO_REPOSITORY))
            && let Some(source) = holdfast_file::password_of(word, self)?
        {
            return Ok(source);
        }
        Ok(PasswordSource::choose_to(args, &self.environment)?)
    }

    /// The password of the user of a pool, of which holdfast.toml may say where it is.
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

    /// A password that is to be new, beside the one that opens the repository.
    pub fn new_password(&self, args: &NewPasswordArgs) -> Result<Password, Error> {
        let mut warn = |message: &str| self.console.warning(message);
        let read = PasswordSource::choose_new(args).read(PasswordUse::New, &ControllingTerminal, &mut warn);
        Ok(read.map_err(|error| match error {
            PasswordError::NoTerminal => PasswordError::NoTerminalForNew,
            other => other,
        })?)
    }

    /// The password of the repository, from wherever it is to come.
    pub fn password(&self, password_use: PasswordUse) -> Result<Password, Error> {
        let source = self.password_source()?;
        if source == PasswordSource::Prompt && self.variable(environment::JOB).is_some() {
            // A scheduler has started us: its terminal, if it has one, is not ours, and nobody looks at it.
            return Err(PasswordError::NoTerminal.into());
        }
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
        ProgressDisplay::start(
            Arc::clone(&self.console),
            Arc::clone(&self.clock),
            show,
            self.requests.clone(),
        )
    }

    /// Makes Ctrl-C a request to stop, which the job looks at; to be called when the job begins.
    ///
    /// Once the job has ended with `Interrupted`, the program ends by the signal that asked for it.
    pub fn interrupt(&self) -> Result<Interrupt, Error> {
        if let Some(listener) = self.listener.get() {
            return Ok(listener.interrupt().clone());
        }
        let listener = listen().map_err(Error::Signals)?;
        let console = self.shared_console();
        let tell = move |who: &str| {
            console.clear_progress();
            console.error(
                &[format!(
                    "interrupted; {who} does not answer, and the program ends without clearing up"
                )],
                Some("a machine is looked after by its watchdog; `holdfast doctor` shows what else is left"),
            );
        };
        end_when_stuck(&listener, Arc::clone(&self.clock), tell).map_err(Error::Signals)?;
        Ok(self.listener.get_or_init(|| listener).interrupt().clone())
    }

    /// The question whether a signal asked to stop. Where no job has begun a signal ends the program, and there is nothing to ask.
    pub fn stop_question(&self) -> Arc<dyn Fn() -> bool + Send + Sync> {
        match self.listener.get() {
            Some(listener) => listener.interrupt().question(),
            None => Arc::new(|| false),
        }
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

/// Whether an error was brought about by somebody who was asked to stop, however far down that stands.
fn says_interrupted(error: &(dyn std::error::Error + 'static)) -> bool {
    // What an error of I/O holds is not told of as its cause.
    let held = error.downcast_ref::<std::io::Error>().and_then(std::io::Error::get_ref);
    error.is::<Interrupted>()
        || held.is_some_and(|held| says_interrupted(held))
        || error.source().is_some_and(says_interrupted)
}
