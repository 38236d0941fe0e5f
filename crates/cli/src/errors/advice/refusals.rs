//! Advice on machines that cannot be restored.

use holdfast_engine::Refusal;

use super::Advice;
use crate::errors::Kind;
use crate::exit::Exit;

/// The advice on a refusal.
pub(super) fn refusal_advice(refusal: &Refusal) -> Advice {
    let (exit, kind, hint) = match refusal {
        Refusal::NoPoint { present, .. } => return no_point(present),
        Refusal::MachineGone { machine, point } => return machine_gone(machine, point),
        Refusal::OtherHost { .. } => (
            Exit::Error,
            Kind::Unsupported,
            "run holdfast on that host, with a repository that is accessible there",
        ),
        Refusal::OtherUser { .. } => (
            Exit::Error,
            Kind::Refused,
            "run holdfast as that user; disks can be restored to files of your own",
        ),
        Refusal::CannotResume { .. } => (
            Exit::Error,
            Kind::Refused,
            "--start boots it instead, as after a power cut",
        ),
        Refusal::NoConfiguration { .. } => (
            Exit::Error,
            Kind::NotFound,
            "restore its disks to files; only machines that were backed up from libvirt can be restored to libvirt",
        ),
        Refusal::MachineExists { .. } => (
            Exit::Error,
            Kind::Exists,
            "choose another name (for many clones, another --first); for a restore, omit --keep-identity to have both machines, or restore --in-place over the existing one",
        ),
        Refusal::DiskMissing { .. } => (
            Exit::Error,
            Kind::Refused,
            "restore to a new machine, or single disks to files",
        ),
        Refusal::NoDevice { .. } => (
            Exit::Error,
            Kind::NotFound,
            "create the volume again, at least as large as the disk; or restore to a new machine, with --disk or --storage",
        ),
        Refusal::NoPlace { .. } => (
            Exit::Error,
            Kind::NotFound,
            "use --disk DISK=PATH, with --force for a block device, or --storage FOLDER",
        ),
        Refusal::NoFolder { .. } => (Exit::Error, Kind::NotFound, "make it, or use --storage FOLDER"),
        Refusal::UnknownDisk { .. } => (Exit::Error, Kind::NotFound, "name disks as the snapshot does: vda"),
        Refusal::PathTaken { .. } => (Exit::Error, Kind::Exists, "use another path, or remove the file"),
        Refusal::InUse { .. } => (Exit::Error, Kind::Refused, "use another place, or restore that machine"),
        Refusal::NoRoom { .. } => (
            Exit::Error,
            Kind::NoSpace,
            "free space on the target, or use another --storage FOLDER",
        ),
        Refusal::Configuration { .. } | Refusal::TooLarge { .. } => (
            Exit::Error,
            Kind::Refused,
            "restore the disks to files, and domain.xml to define the machine by hand",
        ),
        _ => of_host(refusal),
    };
    Advice {
        exit,
        kind,
        hint: Some(hint.to_owned()),
    }
}

/// The advice if the host or the hypervisor is the reason.
fn of_host(refusal: &Refusal) -> (Exit, Kind, &'static str) {
    match refusal {
        Refusal::WouldNotStart { .. } => (
            Exit::Error,
            Kind::Refused,
            "correct that first; or restore it without --start, --resume and --live, and change its configuration by virsh edit",
        ),
        Refusal::DomainType { .. } => (
            Exit::Error,
            Kind::Unsupported,
            "--domain-type qemu creates an emulated machine, which is slow; or load the kernel modules of KVM",
        ),
        _ => of_present_machine(refusal),
    }
}

/// The advice if the existing machine is the reason.
fn of_present_machine(refusal: &Refusal) -> (Exit, Kind, &'static str) {
    match refusal {
        Refusal::NotShutOff { .. } => (
            Exit::Error,
            Kind::Refused,
            "shut it off first (rollback --power-off switches it off); or restore to a new machine",
        ),
        Refusal::Transient { .. } => (
            Exit::Error,
            Kind::Refused,
            "virsh dumpxml and virsh define make it persistent; or holdfast clone creates a new machine",
        ),
        Refusal::AnotherMachine { .. } => (
            Exit::Error,
            Kind::Refused,
            "name it by --name to overwrite its disks and keep its configuration",
        ),
        Refusal::KeptStates { .. } => (
            Exit::Error,
            Kind::Refused,
            "virsh snapshot-delete, checkpoint-delete and managedsave-remove remove them; or restore to a new machine",
        ),
        _ => (Exit::Locked, Kind::Locked, "look what has changed, and try again"),
    }
}

fn machine_gone(machine: &str, point: &str) -> Advice {
    Advice {
        exit: Exit::Error,
        kind: Kind::NotFound,
        hint: Some(format!(
            "holdfast clone {machine}@{point} {machine} creates a new machine from it"
        )),
    }
}

/// Lists the existing host snapshots.
fn no_point(present: &[String]) -> Advice {
    let hint = match present {
        [] => "holdfast host list shows which host snapshots there are".to_owned(),
        names => format!("the newest that are there: {}", names.join(", ")),
    };
    Advice {
        exit: Exit::Error,
        kind: Kind::NotFound,
        hint: Some(hint),
    }
}
