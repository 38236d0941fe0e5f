//! `holdfast backup` of machines of VirtualBox.

use std::time::Duration;

use holdfast_engine::{
    MachineName, ParentChoice, VirtualBox, VirtualBoxBackup, VirtualBoxMachine, VirtualBoxMemory, back_up_virtualbox,
};
use holdfast_host::DiskChoice;
use holdfast_repo::{Processes as _, Repository, SystemProcesses};

use super::BackupArgs;
use super::machines_done::MachineDone;
use crate::context::Context;
use crate::errors::Error;
use crate::virtualbox::{self, Choice};
use crate::{runs, time};

/// The machines that words mean; options that say nothing to VirtualBox are refused.
pub(super) fn choose<'a>(
    place: &'a VirtualBox,
    words: &[String],
    args: &BackupArgs,
    context: &Context,
) -> Result<Choice<'a>, Error> {
    let foreign = args
        .machines
        .reading
        .only_of_qemu()
        .or_else(|| args.machines.reading.limits.given());
    if let Some(option) = foreign.filter(|_| !words.is_empty()) {
        return Err(Error::usage(
            format!("{option} says nothing to VirtualBox"),
            "leave it out, and back up machines of VirtualBox by themselves",
        ));
    }
    virtualbox::choose(place, words, &args.machines.exclude_machine, context)
}

/// Backs up a machine.
pub(super) fn back_up(
    machine: &VirtualBoxMachine<'_>,
    args: &BackupArgs,
    parent: &ParentChoice,
    repository: &Repository,
    context: &Context,
) -> Result<MachineDone, Error> {
    let name = match &args.machine {
        Some(name) => name.clone(),
        None => MachineName::new(machine.name())?,
    };
    let way = ["--connect".into(), format!("vbox:{}", machine.uuid()).into()];
    let request = VirtualBoxBackup {
        machine,
        name,
        choice: DiskChoice {
            include: args.machines.include.clone(),
            exclude: args.machines.exclude.clone(),
        },
        allowed: args.allowed.clone(),
        memory: if args.machines.with_memory.is_some() {
            VirtualBoxMemory::Store
        } else {
            VirtualBoxMemory::Leave
        },
        parent: parent.clone(),
        tags: args.tags.clone(),
        now: &time::now,
        host: SystemProcesses.this().host,
        program: crate::commands::PROGRAM.to_owned(),
        zone: context.zone().clone(),
        journal: runs::journal(context, &way),
        patience: Duration::from_secs(args.machines.reading.wait.unwrap_or_default()),
        run: runs::new_run()?,
    };
    let report = context.work(args.job.thread_count(), |job| {
        back_up_virtualbox(repository, request, job)
    })?;
    Ok(MachineDone::from(report))
}
