//! `holdfast backup` of machines, by the names that their hypervisors know.

use std::path::PathBuf;
use std::time::Duration;

use holdfast_engine::{MachineBackupRequest, MachineName, Method, ParentChoice, back_up_machine};
use holdfast_host::DiskChoice;
use holdfast_host::qemu::memory::MemoryWay;
use holdfast_repo::{Processes as _, Repository, SystemProcesses};

use super::BackupArgs;
use super::hooks::{self, HookArgs};
use super::limits::LimitArgs;
use super::machines_done::{Failed, LeftOut, MachineDone, MachinesDone};
use super::{of_pools, of_virtualbox};
use crate::context::Context;
use crate::datasets;
use crate::errors::{Error, chain};
use crate::exit::Exit;
use crate::guests::{MemoryHow, QuiesceWhen};
use crate::machines::{Choice, Chosen, Everything, Found, Glob, Hypervisors, MachineWord, Wish};
use crate::{runs, time, virtualbox};

/// How long a write of a guest may wait for its copy.
const WRITE_DEADLINE: Duration = Duration::from_secs(3);

/// Options of `backup` that are about machines.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Options for machines")]
pub(super) struct MachineArgs {
    /// The hypervisor's address: qemu:///system, qemu:///session, qemu+ssh://HOST/system
    #[arg(short, long, value_name = "URI")]
    connect: Option<String>,
    /// Back up all machines that libvirt knows, but for those whose own metadata leaves them out
    #[arg(short, long)]
    all: bool,
    /// Leave out machines that match, of those that patterns, tags and --all mean; may be given several times
    #[arg(long, value_name = "PATTERN", value_parser = Glob::parse)]
    pub(super) exclude_machine: Vec<Glob>,
    /// Back up this disk of the machine only (vda); may be given several times
    #[arg(long, value_name = "DISK")]
    pub(super) include: Vec<String>,
    /// Leave this disk of the machine out; may be given several times
    #[arg(long, value_name = "DISK")]
    pub(super) exclude: Vec<String>,
    /// Whether to freeze the machine's file systems for the instant, by its guest agent
    #[arg(long, value_enum, value_name = "WHEN", default_value_t = QuiesceWhen::Try)]
    quiesce: QuiesceWhen,
    /// Take the machine's memory too, of the same instant: restored, it goes on where it was
    #[arg(long, value_enum, value_name = "HOW", num_args = 0..=1, require_equals = true, default_missing_value = "auto")]
    pub(super) with_memory: Option<MemoryHow>,
    /// Where to keep what the machine overwrites while it is read: a folder with room, on a local disk
    #[arg(long, value_name = "FOLDER")]
    scratch: Option<PathBuf>,
    /// How to read the disks of a machine that runs; without this, the best way that it offers
    #[arg(long, value_enum, value_name = "HOW")]
    method: Option<MethodHow>,
    /// Wait so long for another backup of the machine, which may be under way; without this, it ends with exit code 4
    #[arg(long, value_name = "SECONDS")]
    pub(super) wait: Option<u64>,
    #[command(flatten)]
    pub(super) limits: LimitArgs,
    #[command(flatten)]
    hooks: HookArgs,
}

/// How the disks of a machine that runs are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum MethodHow {
    /// From a filter in its QEMU: nothing is left behind, and the next run reads only what changed
    Filter,
    /// From clones of its images, where their file system has such (XFS, btrfs)
    Reflink,
    /// From its images, while it writes to overlays, which are brought down into them afterwards
    Overlay,
    /// From its images, while it stands still
    Pause,
    /// From host snapshots (ZFS, btrfs, XFS, thin LVM), one of which stays until the next backup: on btrfs and XFS that reads only what changed
    Snapshot,
}

impl From<MethodHow> for Method {
    fn from(how: MethodHow) -> Self {
        match how {
            MethodHow::Filter => Self::Filter,
            MethodHow::Reflink => Self::Reflink,
            MethodHow::Overlay => Self::Overlay,
            MethodHow::Pause => Self::Pause,
            MethodHow::Snapshot => Self::Snapshot,
        }
    }
}

impl MachineArgs {
    /// The machines that these options and words mean.
    fn wish(&self, words: Vec<MachineWord>) -> Result<Wish, Error> {
        if !self.exclude_machine.is_empty() && !self.all && !words.iter().any(MachineWord::means_several) {
            return Err(Error::usage(
                "--exclude-machine is about patterns, tags and --all, and every machine is named in full",
                "leave it out",
            ));
        }
        Ok(Wish {
            words,
            everything: if self.all {
                Everything::Wanted
            } else {
                Everything::NotWanted
            },
            excluded: self.exclude_machine.clone(),
        })
    }

    /// The first option that was given and is about machines of QEMU alone; limits are not looked at.
    pub(super) fn only_of_qemu(&self) -> Option<&'static str> {
        let given = [
            (self.quiesce == QuiesceWhen::Require, "--quiesce require"),
            (self.scratch.is_some(), "--scratch"),
            (self.method.is_some(), "--method"),
        ];
        let first = given.into_iter().find(|(is_given, _)| *is_given).map(|(_, name)| name);
        first.or_else(|| self.hooks.given())
    }

    /// The options that were given, for an error about them.
    pub(super) fn given(&self) -> Option<&'static str> {
        let given = [
            (self.connect.is_some(), "--connect"),
            (self.all, "--all"),
            (!self.exclude_machine.is_empty(), "--exclude-machine"),
            (!self.include.is_empty(), "--include"),
            (!self.exclude.is_empty(), "--exclude"),
            (self.quiesce != QuiesceWhen::Try, "--quiesce"),
            (self.with_memory.is_some(), "--with-memory"),
            (self.scratch.is_some(), "--scratch"),
            (self.method.is_some(), "--method"),
        ];
        let first = given.into_iter().find(|(is_given, _)| *is_given).map(|(_, name)| name);
        first.or_else(|| self.limits.given()).or_else(|| self.hooks.given())
    }
}

/// Backs up machines, one after another. One that fails does not keep the others from it.
pub(super) fn run(
    words: Vec<MachineWord>,
    args: &BackupArgs,
    parent: &ParentChoice,
    context: &Context,
) -> Result<Exit, Error> {
    check_options(args)?;
    let hypervisors = Hypervisors::new(args.machines.connect.as_deref(), context);
    let place = virtualbox::place(context);
    let mut wish = args.machines.wish(words)?;
    let apart = MachineWord::apart(wish.words);
    wish.words = apart.others;
    let boxes = of_virtualbox::choose(&place, &apart.of_virtualbox, args, context)?;
    let of_pools = of_pools::choose(&apart.of_pools, args, context)?;
    let is_asked = !wish.words.is_empty() || wish.everything == Everything::Wanted;
    let Choice { chosen, mut left_out } = if is_asked {
        hypervisors.choose(&wish)?
    } else {
        Choice::default()
    };
    left_out.extend(boxes.left_out);
    let machine_count = chosen.len() + boxes.chosen.len() + of_pools.len();
    if args.machine.is_some() && machine_count > 1 {
        return Err(Error::usage(
            "--machine names one machine, and there are several",
            "leave --machine out",
        ));
    }
    let repository = context.open_repository()?;
    let mut done = MachinesDone {
        machines: Vec::new(),
        failed: Vec::new(),
        left_out_machines: left_out.into_iter().map(LeftOut::from).collect(),
    };
    let mut add = |said: &str, outcome: Result<MachineDone, Error>| {
        match outcome {
            Ok(machine) => done.machines.push(machine),
            // With one machine the error is the answer; and who interrupts one means all.
            Err(error) if machine_count == 1 || matches!(error, Error::Interrupted(_)) => return Err(error),
            Err(error) => {
                let causes = chain(&error);
                context.console().error(&causes, error.advice().hint.as_deref());
                done.failed.push(Failed {
                    machine: said.to_owned(),
                    error: causes.join(": "),
                });
            }
        }
        Ok(())
    };
    for one in &chosen {
        add(
            &one.said,
            back_up(one, args, parent, &hypervisors, &repository, context),
        )?;
    }
    for one in &boxes.chosen {
        add(
            one.name(),
            of_virtualbox::back_up(one, args, parent, &repository, context),
        )?;
    }
    for one in &of_pools {
        let outcome = of_pools::back_up(one, args, parent, &repository, context);
        add(&one.said(), outcome)?;
    }
    context.report(&done)
}

/// Options that contradict each other.
fn check_options(args: &BackupArgs) -> Result<(), Error> {
    if args.machines.with_memory.is_some() && args.machines.quiesce == QuiesceWhen::Require {
        return Err(Error::usage(
            "--with-memory and --quiesce require do not go together: memory holds what the file systems have not written yet",
            "leave one of them out",
        ));
    }
    if args.machines.method == Some(MethodHow::Pause) && args.machines.quiesce == QuiesceWhen::Require {
        return Err(Error::usage(
            "--method pause and --quiesce require do not go together: file systems that are frozen thaw by themselves after seconds",
            "leave one of them out",
        ));
    }
    Ok(())
}

fn back_up(
    chosen: &Chosen,
    args: &BackupArgs,
    parent: &ParentChoice,
    hypervisors: &Hypervisors<'_>,
    repository: &Repository,
    context: &Context,
) -> Result<MachineDone, Error> {
    let Found {
        machine,
        way,
        address,
        hypervisor,
    } = hypervisors.find(chosen)?;
    let overlays = match hypervisor {
        "libvirt" => Some(hypervisors.libvirt()? as _),
        _ => None,
    };
    let hooks = args.machines.hooks.hooks(&address.to_string_lossy())?;
    let run = runs::new_run()?;
    let name = match &args.machine {
        Some(name) => name.clone(),
        None => MachineName::new(machine.name())?,
    };
    let journal = runs::journal(context, &way);
    let mut watchdog = runs::watchdog(way, run, journal.as_ref())?;
    watchdog.extend(hooks::words(&hooks, &name, &*machine)?);
    let providers = datasets::providers(context);
    let request = MachineBackupRequest {
        name,
        machine: &*machine,
        overlays,
        method: args.machines.method.map(Method::from),
        providers: &providers,
        choice: DiskChoice {
            include: args.machines.include.clone(),
            exclude: args.machines.exclude.clone(),
        },
        allowed: args.allowed.clone(),
        parent: parent.clone(),
        tags: args.tags.clone(),
        now: &time::now,
        host: SystemProcesses.this().host,
        program: crate::commands::PROGRAM.to_owned(),
        zone: context.zone().clone(),
        scratch: args.machines.scratch.clone().unwrap_or_else(runs::scratch_folder),
        runtime: context.runtime_folder(),
        write_deadline: WRITE_DEADLINE,
        quiesce: args.machines.quiesce.into(),
        memory: args.machines.with_memory.map(MemoryWay::from),
        watchdog: Some(watchdog),
        journal,
        processes: &SystemProcesses,
        hooks,
        limits: args.machines.limits.limits(),
        patience: Duration::from_secs(args.machines.wait.unwrap_or_default()),
        run,
    };
    let report = context.work(args.job.thread_count(), |job| back_up_machine(repository, request, job))?;
    Ok(MachineDone::from(report))
}
