//! `holdfast backup` of machines of VirtualBox.

use holdfast_engine::{
    SnapshotOptions, VirtualBox, VirtualBoxBackup, VirtualBoxMachine, VirtualBoxMemory, back_up_virtualbox,
    plan_virtualbox_backup,
};
use holdfast_repo::Repository;

use super::BackupArgs;
use super::planned::Turn;
use crate::context::Context;
use crate::errors::{Error, Kind};
use crate::machines::virtualbox::{self, VirtualBoxChoice};

/// The hypervisor address of VirtualBox machines, for called programs.
const HYPERVISOR: &str = "vbox:";

/// The machines that the words select; options that do not apply to VirtualBox are an error.
pub(super) fn choose<'a>(
    place: &'a VirtualBox,
    words: &[String],
    args: &BackupArgs,
    context: &Context,
) -> Result<VirtualBoxChoice<'a>, Error> {
    if !words.is_empty() {
        args.machines.refuse_qemu_options("VirtualBox")?;
    }
    virtualbox::choose(place, words, &args.machines.exclude_machine, context)
}

/// Backs up one of the selected machines.
pub(super) fn back_up(
    machine: &VirtualBoxMachine<'_>,
    chosen: &[VirtualBoxMachine<'_>],
    args: &BackupArgs,
    snapshot: &SnapshotOptions,
    repository: &Repository,
    context: &Context,
) -> Result<Turn, Error> {
    if chosen.iter().filter(|other| other.name() == machine.name()).count() > 1 {
        let (name, uuid) = (machine.name(), machine.uuid());
        return Err(Error::refused(
            Kind::Exists,
            format!(
                "{name} ({uuid}): another machine that is to be backed up has this name, and they would be listed as one"
            ),
            format!("back each of them up by itself, under a name of yours: vbox:{uuid} with --machine NAME"),
        ));
    }
    let way = ["--connect".into(), format!("vbox:{}", machine.uuid()).into()];
    let name = args.listed(machine.name(), &format!("vbox:{}", machine.uuid()))?;
    let request = VirtualBoxBackup {
        machine,
        capture: args.capture_options(name, HYPERVISOR, &way, context)?,
        memory: if args.machines.with_memory.is_some() {
            VirtualBoxMemory::Store
        } else {
            VirtualBoxMemory::Leave
        },
        bytes_per_second: args.machines.reading.limits.limits().bytes_per_second,
    };
    context.work(args.job.thread_count(), |job| {
        if args.dry_run {
            let plan = plan_virtualbox_backup(repository, request, snapshot.clone(), job)?;
            return Ok(Turn::Planned(plan.into()));
        }
        let report = back_up_virtualbox(repository, request, snapshot.clone(), job)?;
        Ok(Turn::BackedUp(Box::new(report.into())))
    })
}
