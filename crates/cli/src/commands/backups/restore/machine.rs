//! `holdfast restore --to-machine`: restores a snapshot as a machine of a hypervisor.

use std::num::NonZeroU64;
use std::path::PathBuf;

use holdfast_engine::{
    AfterRestore, ConfigurationChoice, FillRate, InPlaceOptions, MachineName, MachineRestoreRequest,
    NewMachineIdentity, NewMachineOptions, Overwrite, Presence, RestoreAs, plan_machine_restore, restore_machine,
};

use super::RestoreArgs;
use super::done::MachineRestored;
use crate::context::Context;
use crate::errors::Error;
use crate::exit::Exit;
use crate::machines::runs;
use crate::machines::states::StateArgs;
use crate::machines::{connect_libvirt, libvirt_address};

/// Options of `restore` that are about machines.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Options for machines")]
#[expect(clippy::struct_excessive_bools, reason = "each is an option of its own")]
pub(super) struct MachineRestoreArgs {
    /// Restore a whole machine: a new one, or with --in-place the existing one
    #[arg(long)]
    pub(super) to_machine: bool,
    /// The hypervisor's address: qemu:///system, qemu:///session
    #[arg(short, long, value_name = "URI")]
    connect: Option<String>,
    /// Name of the new machine, or of the machine to restore in place [default: NAME-restored, or the snapshot's machine]
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// Keep the machine's name, UUID and network addresses; the original must be gone
    #[arg(long, conflicts_with = "in_place")]
    keep_identity: bool,
    /// Accelerator of the new machine: kvm, or qemu on a host without KVM [default: as before]
    #[arg(long, value_name = "TYPE", value_parser = ["kvm", "qemu"], conflicts_with_all = ["in_place", "resume"])]
    domain_type: Option<String>,
    /// Folder for the new images [default: beside the originals]
    #[arg(long, value_name = "FOLDER", conflicts_with = "in_place")]
    storage: Option<PathBuf>,
    /// Where to put a disk: a new file, or with --force an existing file or block device; may be repeated
    #[arg(long = "disk", value_name = "DISK=PATH", value_parser = parse_place, conflicts_with = "in_place")]
    places: Vec<(String, PathBuf)>,
    /// With --in-place: restore the machine's configuration too
    #[arg(long, requires = "in_place")]
    configuration: bool,
    /// Start the machine after the restore
    #[arg(long)]
    start: bool,
    /// Resume the machine from the memory in the snapshot
    #[arg(long, conflicts_with = "start")]
    resume: bool,
    /// Start the machine at once from the snapshot, and fill its images while it runs
    #[arg(long, conflicts_with_all = ["in_place", "start", "resume"])]
    live: bool,
    /// With --live: fill the images with at most this many bytes per second (50M) [default: 64M, doubled each minute]
    #[arg(long, value_name = "SIZE", value_parser = crate::args::parse_rate, requires = "live")]
    bwlimit: Option<NonZeroU64>,
}

impl MachineRestoreArgs {
    /// An option that was given but has no meaning without `--to-machine`.
    pub(super) fn out_of_place(&self) -> Option<&'static str> {
        let given = [
            ("--connect", self.connect.is_some()),
            ("--name", self.name.is_some()),
            ("--keep-identity", self.keep_identity),
            ("--domain-type", self.domain_type.is_some()),
            ("--storage", self.storage.is_some()),
            ("--disk", !self.places.is_empty()),
            ("--configuration", self.configuration),
            ("--start", self.start),
            ("--resume", self.resume),
            ("--live", self.live),
            ("--bwlimit", self.bwlimit.is_some()),
        ];
        let found = given.into_iter().find(|(_, is_given)| *is_given && !self.to_machine);
        found.map(|(option, _)| option)
    }
}

/// `vda=/dev/vg/web1`
fn parse_place(text: &str) -> Result<(String, PathBuf), String> {
    match text.split_once('=') {
        Some((disk, path)) if !disk.is_empty() && !path.is_empty() => Ok((disk.to_owned(), path.into())),
        _ => Err("use DISK=PATH, such as vda=/images/web1.qcow2".to_owned()),
    }
}

/// The request from the options.
fn request(args: &RestoreArgs, context: &Context) -> Result<MachineRestoreRequest, Error> {
    let machine = &args.machine;
    if args.snapshot.disk.is_some() {
        return Err(Error::usage(
            "a machine is restored with all its disks",
            "name the snapshot only; a single disk is restored to a file or block device",
        ));
    }
    if args.force && machine.places.is_empty() {
        return Err(Error::usage(
            "--force is about files and block devices that --disk names",
            "remove the option; --in-place restores to the existing machine",
        ));
    }
    let restore_as = if args.in_place {
        if args.format.is_some() {
            return Err(Error::usage(
                "--format is about new images, and in place the images are there",
                "remove the option",
            ));
        }
        RestoreAs::InPlace(InPlaceOptions {
            machine: machine.name.clone(),
            configuration: if machine.configuration {
                ConfigurationChoice::Restore
            } else {
                ConfigurationChoice::Keep
            },
            presence: Presence::ShutOff,
        })
    } else {
        RestoreAs::NewMachine(NewMachineOptions {
            name: machine.name.clone().map(MachineName::new).transpose()?,
            identity: if machine.keep_identity {
                NewMachineIdentity::Keep
            } else {
                NewMachineIdentity::New
            },
            storage: machine.storage.clone(),
            format: args.format,
            places: machine.places.iter().cloned().collect(),
            domain_type: machine.domain_type.clone(),
            overwrite: if args.force {
                Overwrite::Replace
            } else {
                Overwrite::Refuse
            },
        })
    };
    Ok(MachineRestoreRequest {
        name: args.snapshot.clone(),
        restore_as,
        after: match (machine.resume, machine.start) {
            (true, _) => AfterRestore::Resume,
            (_, true) => AfterRestore::Start,
            _ => AfterRestore::LeaveOff,
        },
        runtime: context.runtime_folder(),
        zone: context.zone().clone(),
    })
}

pub(super) fn run(args: &RestoreArgs, context: &Context) -> Result<Exit, Error> {
    let since = context.clock().now();
    let request = request(args, context)?;
    let uri = libvirt_address(args.machine.connect.as_deref(), context);
    let hypervisor = connect_libvirt(&uri, context)?;
    let repository = context.open_repository()?;
    let environment = context.environment();
    let threads = args.job.thread_count();
    let plan = context.work(threads, |job| {
        plan_machine_restore(&repository, &hypervisor, &request, &environment, job)
    })?;
    if args.machine.live {
        // If the machine fails to start, all its new files are removed.
        plan.refuse_unmet()?;
    }
    for warning in &plan.warnings {
        context.console().warning(warning);
    }
    if args.dry_run {
        return context.report(&MachineRestored::new(&plan, None));
    }
    if args.machine.live {
        let storage = args.machine.storage.as_deref();
        let live = super::live::Live {
            repository: &repository,
            hypervisor: &hypervisor,
            storage,
            rate: FillRate::at_most(args.machine.bwlimit),
            since,
        };
        return live.run(&plan, context);
    }
    let _noted = runs::note_places(plan.files.iter().map(|file| file.to.as_path()), context);
    let report = context.work(threads, |job| {
        let report = restore_machine(&repository, &hypervisor, &plan, &environment, job)?;
        if args.in_place {
            StateArgs::default().forget_unfinished(&plan.machine.uuid, context, job);
        }
        Ok(report)
    })?;
    context.report(&MachineRestored::new(&plan, Some(&report)))
}

#[cfg(test)]
mod tests {
    use super::parse_place;

    #[test]
    fn a_place_is_a_disk_and_a_path() {
        assert_eq!(parse_place("vda=/a=b").unwrap(), ("vda".to_owned(), "/a=b".into()));
        for text in ["vda", "=x", "vda="] {
            assert!(parse_place(text).is_err(), "{text}");
        }
    }
}
