//! Advice on errors of machines, hypervisors and mounts.

use holdfast_engine::{Error as JobError, InstantError};
use holdfast_host::fuse_mount::FuseMountError;
use holdfast_host::{Error as HostError, MachineEnd};

use super::containers::{container_advice, content_advice};
use super::guest_files::guest_files_advice;
use super::providers::provider_advice;
use super::refusals::refusal_advice;
use super::{Advice, advice, plain};
use crate::errors::Kind;
use crate::exit::Exit;

fn host_advice(error: &HostError) -> Advice {
    match error {
        HostError::MonitorInUse { .. } => advice(
            Exit::Locked,
            Kind::Locked,
            "try again when that has ended; or start QEMU with a second monitor for backups: another -qmp unix:PATH,server=on,wait=off",
        ),
        HostError::Unreachable { address, .. } if address.ends_with(holdfast_host::virtualbox::PROGRAM) => {
            advice(Exit::Error, Kind::Io, "check whether VBoxManage list vms works")
        }
        HostError::Unreachable { address, .. } if address.contains('/') && !address.contains("://") => advice(
            Exit::Error,
            Kind::Io,
            "check that QEMU runs with -qmp unix:PATH,server=on,wait=off, and that you have access to the socket",
        ),
        HostError::Unreachable { .. } => advice(
            Exit::Error,
            Kind::Io,
            "check that libvirtd runs and that you have access to it; --connect sets its address; the path of an image has a /",
        ),
        HostError::NoSuchMachine { .. } => advice(
            Exit::Error,
            Kind::NotFound,
            "holdfast machines lists the machines; the path of an image has a /",
        ),
        HostError::Refused { action: "define", .. } => advice(
            Exit::Error,
            Kind::Io,
            "restore the disks to files, and domain.xml to define the machine by hand",
        ),
        HostError::Busy { .. } => advice(Exit::Locked, Kind::Locked, "try again when that has ended"),
        _ => plain(Exit::Error, Kind::Io),
    }
}

fn fuse_advice(error: &FuseMountError) -> Advice {
    match error {
        FuseMountError::Device { source } if source.kind() == std::io::ErrorKind::PermissionDenied => advice(
            Exit::Error,
            Kind::Permission,
            "run the command as root, or let all users open the device with 'chmod 666 /dev/fuse', as the package fuse3 \
             does on systems with udev",
        ),
        FuseMountError::Device { .. } => advice(
            Exit::Error,
            Kind::Unsupported,
            "load the kernel module with 'modprobe fuse'; in a container, pass the device /dev/fuse to it",
        ),
        FuseMountError::NoHelper => advice(
            Exit::Error,
            Kind::Permission,
            "install the package fuse3, or run the command as root",
        ),
        FuseMountError::InUse { .. } => advice(
            Exit::Locked,
            Kind::Locked,
            "close the files below it, and detach loop devices; 'fuser -vm FOLDER' lists the programs",
        ),
        FuseMountError::Helper { .. } => advice(
            Exit::Error,
            Kind::Refused,
            "the folder must belong to you; --allow-other needs user_allow_other in /etc/fuse.conf",
        ),
        _ => plain(Exit::Error, Kind::Io),
    }
}

/// Errors about machines, and those that need no advice.
pub(super) fn machine_advice(error: &JobError) -> Advice {
    let refused = |hint: &str| advice(Exit::Error, Kind::Refused, hint);
    match error {
        JobError::Host(error) => host_advice(error),
        JobError::GuestFiles(error) => guest_files_advice(error),
        JobError::Container(error) => container_advice(error),
        JobError::ContainerContent(error) => content_advice(error),
        JobError::DaemonBusy { .. } => advice(
            Exit::Locked,
            Kind::Locked,
            "one daemon runs all jobs of a host; holdfast run JOB runs one now, beside the daemon",
        ),
        JobError::PolicyBusy { .. } => advice(Exit::Locked, Kind::Locked, "it ends by itself; this run may begin then"),
        JobError::Provider(error) => provider_advice(error),
        JobError::MachineRestore(refusal) => refusal_advice(refusal),
        JobError::Instant(InstantError::NotFilled { .. }) => advice(
            Exit::Error,
            Kind::NotFound,
            "holdfast resume without a name continues all unfinished ones",
        ),
        JobError::Instant(InstantError::Busy { .. }) => {
            advice(Exit::Locked, Kind::Locked, "wait until that process ends, or end it")
        }
        JobError::Instant(InstantError::Server { .. } | InstantError::Stopped { .. }) => refused(
            "make sure that the repository can be read and that there is free space, then run holdfast resume again",
        ),
        JobError::FuseMount(error) => fuse_advice(error),
        JobError::NoSuchDisk { .. } => advice(Exit::Error, Kind::NotFound, "name disks as the machine does: vda"),
        JobError::MachineBetween { .. } => advice(Exit::Locked, Kind::Locked, "try again when it runs, or is shut off"),
        JobError::Unreachable { .. } => refused("start the machine, or skip the disk with --exclude"),
        JobError::NotQuiesced { .. } => refused(
            "install qemu-guest-agent in the guest, and add its channel to the machine; without --quiesce=require the snapshot is crash-consistent",
        ),
        JobError::ScratchLimit { .. } => advice(
            Exit::Error,
            Kind::NoSpace,
            "use a --scratch folder with more space, or back up when the machine writes less; data that is already stored is not stored again",
        ),
        JobError::Hook { .. } => refused("fix the hook program; --hook-failure=warn continues without it"),
        JobError::NoMethod { .. } => refused(
            "remove --method; without memory, --method=pause reads the machine while it is paused; or shut it off",
        ),
        JobError::NoImageFile { .. } => refused("skip the disk with --exclude, or choose another --method"),
        JobError::NoDevice { .. } => refused("skip the disk with --exclude"),
        JobError::MemorySentBefore { .. } => refused(
            "remove --with-memory, or let the machine run and pause it again; nothing has changed in its memory since then",
        ),
        JobError::NoDisks { .. } => refused("name a disk with --include, or skip the machine with --exclude-machine"),
        JobError::MachineEnded {
            how: MachineEnd::SwitchedOff,
            ..
        } => refused("back it up again: it is read from its images while it is shut off"),
        JobError::MachineEnded { .. } => advice(
            Exit::Error,
            Kind::Io,
            "the log of its QEMU may show why; back it up again: a machine that is shut off is read from its images",
        ),
        JobError::FrozenBroken { .. } => advice(
            Exit::Error,
            Kind::NoSpace,
            "use a --scratch folder with more space on a faster disk, and try again: data that is already stored is not stored again",
        ),
        _ => plain(Exit::Error, Kind::Io),
    }
}
