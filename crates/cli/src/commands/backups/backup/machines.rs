//! `holdfast backup` for machines that are given by their names in a hypervisor.

use std::ffi::OsString;

use holdfast_block::error_messages;
use holdfast_engine::{CaptureOptions, MachineName, SnapshotOptions, back_up_machine, plan_machine_backup};
use holdfast_host::DiskChoice;
use holdfast_host::qemu::memory::MemoryMethod;
use holdfast_repo::{Processes as _, Repository, SystemProcesses};

use super::BackupArgs;
use super::machines_done::{Failed, LeftOut, MachineDone, MachinesDone};
use super::planned::{BackupsPlanned, PlannedDocument, Turn};
use super::reading::{ReadingArgs, ReadingOptions};
use super::{of_containers, of_pools, of_virtualbox};
use crate::context::Context;
use crate::errors::Error;
use crate::exit::Exit;
use crate::machines::guests::{MemoryHow, QuiesceWhen};
use crate::machines::runs;
use crate::machines::virtualbox;
use crate::machines::{Choice, Chosen, Everything, Glob, Hypervisors, MachineSelection, MachineWord};
use crate::output::Part;
use crate::process::time;

/// Options of `backup` that are about machines.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Options for machines")]
pub(super) struct MachineBackupArgs {
    /// Back up all libvirt machines, except those whose metadata excludes them
    #[arg(short, long)]
    all: bool,
    /// Exclude machines that match, where patterns, tags or --all choose them; may be repeated
    #[arg(long, value_name = "PATTERN", value_parser = Glob::parse)]
    pub(super) exclude_machine: Vec<Glob>,
    /// Back up only this disk (vda); may be repeated
    #[arg(long, value_name = "DISK")]
    include: Vec<String>,
    /// Exclude this disk; may be repeated
    #[arg(long, value_name = "DISK")]
    exclude: Vec<String>,
    /// Also store the machine's memory: a restored machine can resume where it was
    #[arg(long, value_enum, value_name = "HOW", num_args = 0..=1, require_equals = true, default_missing_value = "auto")]
    pub(super) with_memory: Option<MemoryHow>,
    #[command(flatten)]
    pub(super) reading: ReadingArgs,
}

impl MachineBackupArgs {
    /// The selection of machines by these options and words.
    fn wish(&self, words: Vec<MachineWord>) -> Result<MachineSelection, Error> {
        if !self.exclude_machine.is_empty() && !self.all && !words.iter().any(MachineWord::may_be_several) {
            return Err(Error::usage(
                "--exclude-machine is about patterns, tags and --all, and every machine is named in full",
                "remove the option",
            ));
        }
        Ok(MachineSelection {
            words,
            everything: if self.all {
                Everything::Wanted
            } else {
                Everything::NotWanted
            },
            excluded: self.exclude_machine.clone(),
        })
    }

    /// Returns an error if options for QEMU machines are used with another hypervisor.
    pub(super) fn refuse_qemu_options(&self, hypervisor: &str) -> Result<(), Error> {
        match self.reading.only_of_qemu() {
            Some(option) => Err(Error::usage(
                format!("{option} does not apply to {hypervisor}"),
                format!("remove the option, or back up the machines of {hypervisor} with a command of their own"),
            )),
            None => Ok(()),
        }
    }

    /// Returns an error if options are used that do not apply to containers.
    pub(super) fn refuse_options_of_containers(&self) -> Result<(), Error> {
        let given = [
            (!self.include.is_empty(), "--include"),
            (!self.exclude.is_empty(), "--exclude"),
            (self.with_memory.is_some(), "--with-memory"),
        ];
        let first = given.into_iter().find(|(is_given, _)| *is_given).map(|(_, name)| name);
        match first.or_else(|| self.reading.not_of_containers()) {
            Some(option) => Err(Error::usage(
                format!("{option} does not apply to containers"),
                "remove the option, or back up the containers with a command of their own",
            )),
            None => Ok(()),
        }
    }

    /// The selected disks of a machine.
    pub(super) fn disks(&self) -> DiskChoice {
        DiskChoice {
            include: self.include.clone(),
            exclude: self.exclude.clone(),
        }
    }

    /// The options that were given, for error messages.
    pub(super) fn given(&self) -> Option<&'static str> {
        let given = [
            (self.all, "--all"),
            (!self.exclude_machine.is_empty(), "--exclude-machine"),
            (!self.include.is_empty(), "--include"),
            (!self.exclude.is_empty(), "--exclude"),
            (self.with_memory.is_some(), "--with-memory"),
        ];
        let first = given.into_iter().find(|(is_given, _)| *is_given).map(|(_, name)| name);
        first.or_else(|| self.reading.given())
    }
}

/// Backs up machines one after another; a failure does not stop the others.
pub(super) fn run(
    words: Vec<MachineWord>,
    args: &BackupArgs,
    snapshot: &SnapshotOptions,
    context: &Context,
) -> Result<Exit, Error> {
    check_options(args)?;
    let hypervisors = args.machines.reading.hypervisors(context);
    let place = virtualbox::place(context);
    let mut wish = args.machines.wish(words)?;
    let apart = MachineWord::by_hypervisor(wish.words);
    wish.words = apart.others;
    let boxes = of_virtualbox::choose(&place, &apart.of_virtualbox, args, context)?;
    let of_pools = of_pools::choose(&apart.of_pools, args, context)?;
    let containers = of_containers::choose(&apart.containers, args, context)?;
    let is_asked = !wish.words.is_empty() || wish.everything == Everything::Wanted;
    let Choice { chosen, mut left_out } = if is_asked {
        hypervisors.choose(&wish)?
    } else {
        Choice::default()
    };
    left_out.extend(boxes.left_out);
    let machine_count = chosen.len() + boxes.chosen.len() + of_pools.count() + containers.len();
    if args.machine.is_some() && machine_count > 1 {
        return Err(Error::usage(
            "--machine names one machine, and there are several",
            "leave --machine out",
        ));
    }
    let repository = context.open_repository()?;
    let mut turns = Turns::new(context, machine_count);
    for one in &chosen {
        turns.take(&one.said, || {
            back_up(one, args, snapshot, &hypervisors, &repository, context)
        })?;
    }
    for one in &boxes.chosen {
        turns.take(one.name(), || {
            of_virtualbox::back_up(one, &boxes.chosen, args, snapshot, &repository, context)
        })?;
    }
    for (said, error) in of_pools.failed {
        turns.take(&said, || Err(error))?;
    }
    for one in &of_pools.chosen {
        turns.take(&one.said(), || {
            of_pools::back_up(one, args, snapshot, &repository, context)
        })?;
    }
    for one in &containers {
        turns.take(&one.folder.display().to_string(), || {
            of_containers::back_up(one, args, snapshot, &repository, context)
        })?;
    }
    turns.report(args, left_out)
}

/// State of a command that backs up several machines one after another.
struct Turns<'a> {
    context: &'a Context,
    machine_count: usize,
    begun_count: usize,
    done: Vec<MachineDone>,
    planned: Vec<PlannedDocument>,
    failed: Vec<Failed>,
}

impl<'a> Turns<'a> {
    fn new(context: &'a Context, machine_count: usize) -> Self {
        Self {
            context,
            machine_count,
            begun_count: 0,
            done: Vec::new(),
            planned: Vec::new(),
            failed: Vec::new(),
        }
    }

    /// Reports what was done, or planned; `left_out` are machines that were not chosen, with the reason.
    fn report(self, args: &BackupArgs, left_out: Vec<(String, &'static str)>) -> Result<Exit, Error> {
        let left_out = left_out.into_iter();
        let left_out_machines = left_out.map(|(name, reason)| LeftOut::new(name, reason)).collect();
        if args.dry_run {
            let planned = BackupsPlanned::new(self.planned, self.failed, left_out_machines);
            return self.context.report(&planned);
        }
        self.context.report(&MachinesDone {
            machines: self.done,
            failed: self.failed,
            left_out_machines,
        })
    }

    /// Backs up the next machine. Its error ends the command only if it is the only machine, or if the command was
    /// interrupted.
    fn take(&mut self, said: &str, back_up: impl FnOnce() -> Result<Turn, Error>) -> Result<(), Error> {
        self.begun_count += 1;
        if self.machine_count > 1 {
            self.context.begin_part(Part {
                number: self.begun_count,
                count: self.machine_count,
            });
        }
        match back_up() {
            Ok(Turn::BackedUp(machine)) => self.done.push(*machine),
            Ok(Turn::Planned(machine)) => self.planned.push(machine),
            Err(error) if self.machine_count == 1 || matches!(error, Error::Interrupted(_)) => return Err(error),
            Err(error) => {
                let causes = error_messages(&error);
                self.context.console().error(&causes, error.advice().hint.as_deref());
                self.failed.push(Failed {
                    machine: said.to_owned(),
                    error: causes.join(": "),
                });
            }
        }
        Ok(())
    }
}

impl BackupArgs {
    /// Options for a machine of `hypervisor` for called programs; `way` are the arguments with which `holdfast
    /// doctor` finds it.
    pub(super) fn capture_options(
        &self,
        name: MachineName,
        hypervisor: &str,
        way: &[OsString],
        context: &Context,
    ) -> Result<CaptureOptions<'static>, Error> {
        let reading = &self.machines.reading;
        Ok(CaptureOptions {
            name,
            choice: self.machines.disks(),
            allowed: self.allowed.clone(),
            now: &time::now,
            host: SystemProcesses.this().host,
            program: crate::PROGRAM.to_owned(),
            journal: runs::journal(context, way),
            patience: reading.patience(),
            hooks: reading.hooks.hooks(hypervisor)?,
            run: runs::new_run()?,
        })
    }
}

/// Returns an error if options contradict each other.
fn check_options(args: &BackupArgs) -> Result<(), Error> {
    args.machines.reading.check()?;
    if args.machines.with_memory.is_some() && args.machines.reading.quiesce == QuiesceWhen::Require {
        return Err(Error::usage(
            "--with-memory and --quiesce require do not go together: memory holds what the file systems have not written yet",
            "remove one of them",
        ));
    }
    Ok(())
}

fn back_up(
    chosen: &Chosen,
    args: &BackupArgs,
    snapshot: &SnapshotOptions,
    hypervisors: &Hypervisors<'_>,
    repository: &Repository,
    context: &Context,
) -> Result<Turn, Error> {
    let wish = ReadingOptions {
        chosen,
        listed: &|name| args.listed(name, &chosen.said),
        choice: args.machines.disks(),
        allowed: args.allowed.clone(),
        memory: args.machines.with_memory.map(MemoryMethod::from),
    };
    args.machines.reading.read(wish, hypervisors, context, |request| {
        context.work(args.job.thread_count(), |job| {
            if args.dry_run {
                let plan = plan_machine_backup(repository, request, snapshot.clone(), job)?;
                return Ok(Turn::Planned(plan.into()));
            }
            let report = back_up_machine(repository, request, snapshot.clone(), job)?;
            Ok(Turn::BackedUp(Box::new(report.into())))
        })
    })
}
