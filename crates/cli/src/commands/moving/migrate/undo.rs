//! `migrate --undo`: the other host migrates the machine back to this one.
//!
//! The other host cannot reach this one by ssh in general. So it gets a socket that ssh forwards to this program, which
//! serves the migration: requests, the receivers of the disks, and the sockets of the hypervisor.

use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use clap::ValueEnum as _;
use holdfast_block::Clock as _;
use holdfast_engine::{Interrupted, RETURN_SOCKET, RuntimeFolder, return_socket};
use holdfast_host::{DiskKind, DiskSource, Hypervisor, MachineState, Piped};
use holdfast_migration::{FarTools, HostRequests, HostServices, serve_host};
use serde::de::DeserializeOwned;

use super::super::far::{MoveRoute, MoveTarget, program, receive_tools, socket_address, ssh_error};
use super::MigrateArgs;
use super::report::{Migrated, ReturnReport};
use crate::context::Context;
use crate::errors::{Error, Kind};
use crate::exit::Exit;
use crate::machines::{Hypervisors, runs};
use crate::output::Format;
use crate::process::kernel::host_name;
use crate::process::time;

/// Interval of looking whether the program of the other host has ended.
const LOOK_INTERVAL: Duration = Duration::from_millis(20);
/// The exit code of ssh for its own failures, and for programs that a signal has ended.
const CODE_OF_SSH: i32 = 255;

/// How the other host has ended.
pub(super) enum Returned<R> {
    /// It is here. The exit code counts the warnings of the other host.
    Back { report: Box<R>, exit: Exit },
    /// It has shown what it would do, or why it has failed.
    Shown(Exit),
}

/// How the program of the other host has ended.
#[derive(Debug, Clone, Copy)]
pub(super) struct ProgramEnd {
    code: Option<i32>,
    /// Whether it was asked to stop.
    was_stopped: bool,
}

impl MigrateArgs {
    /// Lets the host of `target` migrate the machine to this one.
    pub(super) fn bring_back(&self, target: &MoveTarget, context: &Context) -> Result<Returned<Migrated>, Error> {
        let hypervisors = Hypervisors::new(self.connect.as_deref(), context);
        let hypervisor = hypervisors.libvirt()?;
        let report = KeptReport::default();
        let note = |document| report.note(document);
        let requests = FarTools {
            hypervisor,
            program: program(),
            clock: Arc::clone(context.clock()),
            now_ms: &|| time::now().as_millisecond(),
            image_folder: former_folder(hypervisor, &self.machine)?,
            report: &note,
        };
        let mut words = vec!["--connect".to_owned(), self.address_there()];
        for seed in &self.seed {
            words.extend(["--seed".to_owned(), seed.to_string_lossy().into_owned()]);
        }
        let flags = [
            (self.running.throttle, "--throttle"),
            (self.running.accept_incomplete_memory, "--accept-incomplete-memory"),
            (self.running.post_copy, "--post-copy"),
        ];
        words.extend(flags_of(&flags));
        let path = ReturnPath {
            subject: &self.machine,
            options: words,
            requests: &requests,
        };
        let end = self.let_return(&path, target, context)?;
        end.returned(&report, &self.machine, target, context)
    }

    /// Serves the migration to this host, until the program of the other host has ended.
    pub(super) fn let_return(
        &self,
        path: &ReturnPath<'_>,
        target: &MoveTarget,
        context: &Context,
    ) -> Result<ProgramEnd, Error> {
        let MoveRoute::Ssh(host) = &target.route else {
            return Err(Error::usage(
                format!("nothing comes back from {target}"),
                "name the host as ssh://HOST",
            ));
        };
        let sockets = RuntimeFolder::make(&context.runtime_folder())?;
        let socket = sockets.path().join(RETURN_SOCKET);
        let listener = UnixListener::bind(&socket).map_err(socket_error("create", &socket))?;
        let ssh = host.connect(&self.sending.ssh_option, context)?;
        let far_socket = return_socket(runs::new_run()?);
        ssh.forward_socket_back(&far_socket, &socket).map_err(ssh_error)?;
        let words = self.words_for_return(path, &far_socket, context);
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let services = HostServices {
            requests: path.requests,
            disks: receive_tools(context),
        };
        let has_ended = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let serving = scope.spawn(|| serve_host(&listener, &services, &|| has_ended.load(Ordering::Relaxed)));
            let ended = ssh.start_shown("holdfast", &words).map_err(ssh_error);
            let ended = ended.and_then(|program| wait_for_return(program, context));
            has_ended.store(true, Ordering::Relaxed);
            let served = serving.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            served.map_err(socket_error("serve", &socket))?;
            ended
        })
    }

    /// The command line of the other host.
    fn words_for_return(&self, path: &ReturnPath<'_>, socket: &Path, context: &Context) -> Vec<String> {
        let time = |time: Duration| format!("{}ms", time.as_millis());
        let mut words = vec!["migrate".to_owned()];
        words.extend(path.options.iter().cloned());
        words.extend(["--retry-for".to_owned(), time(self.retry_for)]);
        if let Some(frozen_max) = self.running.max_frozen {
            words.extend(["--max-frozen".to_owned(), time(frozen_max)]);
        }
        if let Some(rate) = self.sending.bwlimit {
            words.extend(["--bwlimit".to_owned(), rate.to_string()]);
        }
        if let Some(how) = context.progress_how().to_possible_value() {
            words.extend(["--progress".to_owned(), how.get_name().to_owned()]);
        }
        words.extend(flags_of(&[
            (self.delete_former, "--delete-former"),
            (self.dry_run, "--dry-run"),
            (self.sending.no_compression, "--no-compression"),
            (context.output().format() == Format::Json, "--json"),
            (context.is_quiet(), "--quiet"),
        ]));
        words.extend([
            "--".to_owned(),
            path.subject.to_owned(),
            socket_address(&host_name(), socket),
        ]);
        words
    }
}

impl ProgramEnd {
    /// What follows from the end of the other program.
    pub(super) fn returned<R: DeserializeOwned + ReturnReport>(
        self,
        report: &KeptReport,
        subject: &str,
        target: &MoveTarget,
        context: &Context,
    ) -> Result<Returned<R>, Error> {
        let exit = exit_of(self.code);
        match report.take().map(serde_json::from_value::<R>) {
            None if self.was_stopped && exit != Some(Exit::Ok) => Err(holdfast_engine::Error::from(Interrupted).into()),
            None => exit.map(Returned::Shown).ok_or_else(|| lost(subject, target)),
            // It is here, also if the connection was lost since.
            Some(Ok(report)) => Ok(Returned::Back {
                report: Box::new(report.returned_from(target)),
                exit: exit.unwrap_or(Exit::Warnings),
            }),
            Some(Err(_)) => {
                let text = format!("{subject} is here, but the report of {target} is of another version");
                context.console().warning(&text);
                Ok(Returned::Shown(Exit::Warnings))
            }
        }
    }
}

fn flags_of<'a>(flags: &'a [(bool, &'static str)]) -> impl Iterator<Item = String> + 'a {
    let given = flags.iter().filter(|(is_set, _)| *is_set);
    given.map(|(_, flag)| (*flag).to_owned())
}

/// What comes back, and how this host answers.
pub(super) struct ReturnPath<'a> {
    /// Its name at the other host.
    pub(super) subject: &'a str,
    /// Options for the program there.
    pub(super) options: Vec<String>,
    /// Answers the requests of that program.
    pub(super) requests: &'a dyn HostRequests,
}

/// The report of the other host, which comes when the migration is complete.
#[derive(Default)]
pub(super) struct KeptReport(Mutex<Option<serde_json::Value>>);

impl KeptReport {
    pub(super) fn note(&self, document: serde_json::Value) {
        *locked(&self.0) = Some(document);
    }

    fn take(&self) -> Option<serde_json::Value> {
        locked(&self.0).take()
    }
}

fn lost(subject: &str, target: &MoveTarget) -> Error {
    Error::refused(
        Kind::Io,
        format!("the connection to {target} was lost while {subject} was migrated back"),
        "look at both hosts; if it is still used there, the same command continues",
    )
}

/// Waits until the program of the other host has ended. A request to stop is passed on.
fn wait_for_return(mut program: Piped, context: &Context) -> Result<ProgramEnd, Error> {
    let interrupt = context.interrupt()?;
    // The end of its input stops it.
    let mut input = program.take_input();
    loop {
        if let Some(ended) = program.try_end().map_err(socket_error("wait for", Path::new("ssh")))? {
            return Ok(ProgramEnd {
                code: ended.code,
                was_stopped: input.is_none(),
            });
        }
        if interrupt.is_requested() {
            input = None;
        }
        context.clock().sleep(LOOK_INTERVAL);
    }
}

fn socket_error(action: &'static str, path: &Path) -> impl Fn(std::io::Error) -> Error {
    move |source| Error::File {
        action,
        path: path.to_owned(),
        source,
    }
}

/// The folder of the disks that the machine had here before; none if it is not defined here.
///
/// # Errors
/// The machine runs here.
fn former_folder(hypervisor: &dyn Hypervisor, machine: &str) -> Result<Option<PathBuf>, Error> {
    let found = match hypervisor.machine(machine) {
        Err(holdfast_host::Error::NoSuchMachine { .. }) => return Ok(None),
        found => found.and_then(|found| found.describe()),
    };
    let found = found.map_err(holdfast_engine::Error::from)?;
    if found.summary.state != MachineState::ShutOff {
        return Err(Error::refused(
            Kind::Refused,
            format!("{machine} is {} here", found.summary.state),
            "--undo brings a machine back that is at the other host",
        ));
    }
    let own = found
        .disks
        .iter()
        .filter(|disk| disk.kind == DiskKind::Disk && !disk.is_read_only);
    let mut folders = own.filter_map(|disk| match &disk.source {
        DiskSource::File(path) => path.parent(),
        _ => None,
    });
    Ok(folders.next().map(Path::to_owned))
}

/// The exit of the program of the other host; none if the connection to it was lost.
fn exit_of(code: Option<i32>) -> Option<Exit> {
    let code = code.filter(|code| *code != CODE_OF_SSH)?;
    let known = Exit::ALL.into_iter().find(|exit| i32::from(exit.code()) == code);
    Some(known.unwrap_or(Exit::Error))
}

fn locked<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
