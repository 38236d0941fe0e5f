//! `holdfast watchdog`: the process that a backup starts before it pauses a machine.

use std::ffi::OsString;
use std::io::Write as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use holdfast_engine::{HookEvent, HookFailure, Hooks, Phase, WatchdogTools, forget_run, noted_runs, watch_over};
use holdfast_host::qemu::RunId;
use holdfast_host::{BareQemu, Hypervisor as _, Libvirt, Machine, MachineState, MachineSummary};
use rustix::process::{Pid, Signal, getppid, kill_process, setsid};

use crate::args::{Example, SharedOptions};
use crate::commands::verb::Verb;
use crate::context::Context;
use crate::errors::Error;
use crate::exit::Exit;
use crate::machines::monitor_path;
use crate::process::environment;

/// Arguments of `watchdog`.
#[derive(Debug, clap::Args)]
pub(crate) struct WatchdogArgs {
    /// The hypervisor's address
    #[arg(long, value_name = "URI")]
    connect: OsString,
    /// The machine
    #[arg(long, value_name = "NAME")]
    machine: String,
    /// The socket of the guest's agent, where the hypervisor is a QEMU's own monitor
    #[arg(long, value_name = "SOCKET")]
    agent: Option<PathBuf>,
    /// The name under which snapshots of the machine are listed
    #[arg(long, value_name = "NAME", default_value = "")]
    listed: String,
    /// The machine's UUID
    #[arg(long, value_name = "UUID", default_value = "")]
    uuid: String,
    /// A program to call on behalf of a backup that died
    #[arg(long = "hook", value_name = "FILE")]
    hooks: Vec<PathBuf>,
    /// How long each call may take
    #[arg(long, value_name = "SECONDS", default_value = "30")]
    hook_timeout: u64,
    /// The folder in which the run is noted
    #[arg(long, value_name = "FOLDER")]
    journal: Option<PathBuf>,
    /// The number of the run
    #[arg(long, value_name = "N")]
    run: u32,
}

impl Verb for WatchdogArgs {
    const EXAMPLES: &'static [Example] = &[Example {
        wish: "Backups start it by themselves",
        line: "holdfast watchdog --connect qemu:///system --machine web1 --run 7",
    }];
    const UNUSED: &'static [SharedOptions] = &[SharedOptions::Repository, SharedOptions::Json, SharedOptions::Progress];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        run(self, context)
    }
}

fn run(args: &WatchdogArgs, context: &Context) -> Result<Exit, Error> {
    // Interrupting the backup from a terminal, or killing its group, must not end the watchdog.
    setsid().ok();
    let backup = getppid();
    let machine = find(args, context).map_err(holdfast_engine::Error::from)?;
    let lines = std::io::BufReader::new(std::io::stdin());
    let ready = |word: &str| {
        let mut stdout = std::io::stdout().lock();
        // If the write fails, the backup is already dead; then its lines have ended as well.
        writeln!(stdout, "{word}").and_then(|()| stdout.flush()).ok();
    };
    let evict = || {
        // With libvirt, backup and watchdog have separate connections to the machine. A QEMU monitor belongs to the
        // backup while that lives; the watchdog has lost its backup if its parent process has changed.
        if monitor_path(&args.connect).is_some()
            && let Some(backup) = backup.filter(|backup| *backup != Pid::INIT)
            && getppid() == Some(backup)
        {
            kill_process(backup, Signal::KILL).ok();
        }
    };
    let call = |events: &[HookEvent]| call_hooks(args, context, events);
    let tools = WatchdogTools {
        evict: &evict,
        call: &call,
    };
    let repaired = watch_over(&*machine, args.run, lines, &**context.clock(), &tools, ready);
    forget(args, &repaired);
    for what in &repaired {
        context
            .console()
            .warning(&format!("the watchdog of {} {what}", args.machine));
    }
    Ok(Exit::Ok.with_warning_count(repaired.len()))
}

/// Removes the journal entry of the run if everything in it is repaired.
fn forget(args: &WatchdogArgs, repaired: &[String]) {
    let is_done = !repaired.is_empty() && !repaired.iter().any(|what| what.starts_with("NOT "));
    // A commit continues in libvirt after this process ends; the doctor completes it with the help of this
    // entry.
    let commits = |folder: &PathBuf| {
        let noted = noted_runs(folder).unwrap_or_default();
        noted
            .iter()
            .any(|note| note.run == RunId(args.run) && note.phase == Phase::Committing)
    };
    if let Some(folder) = args.journal.as_ref().filter(|folder| is_done && !commits(folder)) {
        // If the entry remains, the doctor finds it and sees that nothing else is left.
        forget_run(folder, RunId(args.run)).ok();
    }
}

fn find(args: &WatchdogArgs, context: &Context) -> holdfast_host::Result<Box<dyn Machine>> {
    match monitor_path(&args.connect) {
        Some(path) => {
            let agent = args.agent.as_deref();
            BareQemu::stand_in(path, &args.machine, agent, Arc::clone(context.clock()))
        }
        None => Libvirt::connect(&args.connect.to_string_lossy())?.machine(&args.machine),
    }
}

/// Calls the administrator's hooks instead of the dead backup.
fn call_hooks(args: &WatchdogArgs, context: &Context, events: &[HookEvent]) {
    let hooks = Hooks {
        programs: args.hooks.clone(),
        time_out: Duration::from_secs(args.hook_timeout),
        on_failure: HookFailure::Warn,
        withheld: vec![environment::PASSWORD.to_owned()],
        hypervisor: args.connect.to_string_lossy().into_owned(),
    };
    let machine = MachineSummary {
        name: args.machine.clone(),
        uuid: args.uuid.clone(),
        state: MachineState::Running,
    };
    let called = context.work(1, |job| {
        hooks.owed(&args.listed, &machine, args.run, events, job);
        Ok(())
    });
    if let Err(error) = called {
        context.console().warning(&error.to_string());
    }
}
