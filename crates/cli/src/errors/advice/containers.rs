//! Advice on containers.

use holdfast_engine::{ContainerContentError, ContainerError, MemoryProblem, ServerFailure};

use super::{Advice, advice, plain};
use crate::errors::Kind;
use crate::exit::Exit;

pub(super) fn content_advice(error: &ContainerContentError) -> Advice {
    match error {
        ContainerContentError::IsImage { .. } => advice(
            Exit::Error,
            Kind::Refused,
            "save the archive in a file; container create --from FILE --image TAG unpacks the image",
        ),
        ContainerContentError::SeveralImages { .. } => {
            advice(Exit::Error, Kind::Ambiguous, "choose one with --image TAG")
        }
        ContainerContentError::NoSuchImage { .. } => {
            advice(Exit::Error, Kind::NotFound, "choose one of them with --image TAG")
        }
        _ => plain(Exit::Error, Kind::Io),
    }
}

pub(super) fn container_advice(error: &ContainerError) -> Advice {
    match error {
        ContainerError::Exists { .. } => advice(Exit::Error, Kind::Exists, "name a new folder"),
        ContainerError::BeingCreated { .. } => advice(
            Exit::Locked,
            Kind::Locked,
            "wait for that process; if it was killed, holdfast doctor --fix unmounts and deletes what it has left",
        ),
        ContainerError::Program { package, .. } => {
            advice(Exit::Error, Kind::Io, format!("the package {package} has the program"))
        }
        ContainerError::NoFileSystem { .. }
        | ContainerError::LoopDevice { .. }
        | ContainerError::NbdDevice { .. }
        | ContainerError::Mount { .. } => mount_advice(error),
        ContainerError::InUse { .. } => advice(
            Exit::Locked,
            Kind::Locked,
            "end the programs that use it: fuser -m FOLDER lists them",
        ),
        ContainerError::Mounted { .. } => advice(
            Exit::Locked,
            Kind::Locked,
            "unmount it first: holdfast container unmount CONTAINER",
        ),
        ContainerError::Relocated { .. } => advice(
            Exit::Error,
            Kind::Refused,
            "use it there; holdfast migrate --undo brings it back, and holdfast container mount --take-back uses this one as it was",
        ),
        ContainerError::NoAnswer { .. } => advice(
            Exit::Locked,
            Kind::Locked,
            "another process uses it; if it is mounted, unmount it and mount it again",
        ),
        ContainerError::NotFrozen { .. } => advice(
            Exit::Error,
            Kind::Refused,
            "use --no-freeze for a snapshot of the disk as after a power failure",
        ),
        ContainerError::NotOfContainer { .. } => advice(
            Exit::Error,
            Kind::Refused,
            "holdfast restore SNAPSHOT FOLDER restores its disks; holdfast files restore reads the files on them",
        ),
        ContainerError::Configuration { .. } => advice(
            Exit::Damage,
            Kind::Damage,
            "holdfast verify checks the snapshot; holdfast restore SNAPSHOT:disk FILE restores its disk",
        ),
        ContainerError::OtherVersion { .. } => advice(
            Exit::Error,
            Kind::Unsupported,
            "unmount the container, and mount it again with this program",
        ),
        ContainerError::Memory { problem, .. } => memory_advice(*problem),
        ContainerError::NotMounted { .. } => {
            advice(Exit::Error, Kind::Refused, "mount it first: holdfast container mount")
        }
        ContainerError::Server { failure, .. } => server_advice(*failure),
        _ => plain(Exit::Error, Kind::Io),
    }
}

fn mount_advice(error: &ContainerError) -> Advice {
    match error {
        ContainerError::NoFileSystem { .. } => advice(
            Exit::Error,
            Kind::Unsupported,
            "use --disk to mount the disk as a raw file; ext4, XFS and btrfs can be mounted, on the disk itself or in one partition",
        ),
        ContainerError::LoopDevice { source, .. } => loop_device_advice(source.kind()),
        ContainerError::NbdDevice { source, .. } => nbd_device_advice(source.kind()),
        ContainerError::Mount { .. } => advice(
            Exit::Error,
            Kind::Io,
            "dmesg shows the reason of the kernel; holdfast container check checks the layers, and fsck the disk of --disk",
        ),
        _ => plain(Exit::Error, Kind::Io),
    }
}

fn memory_advice(problem: MemoryProblem) -> Advice {
    let unsupported = |text: &'static str| advice(Exit::Error, Kind::Unsupported, text);
    let refused = |text: &'static str| advice(Exit::Error, Kind::Refused, text);
    match problem {
        MemoryProblem::NoRunc => unsupported(
            "the package runc has it; --runc-program names another one. Without --runc, a snapshot has the disk only",
        ),
        MemoryProblem::NotRunc => unsupported(
            "memory is stored of containers of runc only; for others take a snapshot of the disk, without --runc",
        ),
        MemoryProblem::NoCriu | MemoryProblem::OldCriu => unsupported(
            "install CRIU 4.1 or later (Debian 13 has it), or name it with --criu. Without --runc, a snapshot has the disk only",
        ),
        MemoryProblem::CriuCheck => {
            unsupported("criu check --all says what the kernel lacks. Without --runc, a snapshot has the disk only")
        }
        MemoryProblem::NotRunning => {
            refused("runc list shows the containers; --runc-root names the folder of their state")
        }
        MemoryProblem::Busy => advice(Exit::Locked, Kind::Locked, "wait until it has ended"),
        MemoryProblem::NoText => refused("rename the folder: the path is recorded in the snapshot, as text"),
        MemoryProblem::OtherDisk => refused("name the container of runc whose root.path is below the mount point"),
        MemoryProblem::Checkpoint => refused(
            "nothing was stored, and the container runs on. Files, terminals and sockets outside the container cannot be stored",
        ),
        MemoryProblem::StaysPaused => advice(
            Exit::Error,
            Kind::Io,
            "the snapshot is complete; the server of the container tries again, or use runc resume ID",
        ),
        MemoryProblem::NoMemory => refused(
            "holdfast container snapshots lists them; switch to one with memory first: holdfast container switch",
        ),
        MemoryProblem::DiskChanged => {
            refused("switch to the snapshot again, and resume before anything else mounts the disk")
        }
        MemoryProblem::ConfigChanged => refused("put it back, or use --bundle FOLDER to use another one"),
        MemoryProblem::IdInUse => advice(
            Exit::Locked,
            Kind::Locked,
            "end it first (runc delete --force ID), or use another name with --runc",
        ),
        MemoryProblem::Restore => refused(
            "the container is at the snapshot again, and not mounted; what its config.json mounts must be there as it was",
        ),
    }
}

fn server_advice(failure: ServerFailure) -> Advice {
    match failure {
        ServerFailure::NotFound => advice(
            Exit::Error,
            Kind::NotFound,
            "holdfast container snapshots lists the snapshots",
        ),
        ServerFailure::Invalid => plain(Exit::Usage, Kind::Usage),
        ServerFailure::Refused => plain(Exit::Error, Kind::Refused),
        ServerFailure::Locked => advice(
            Exit::Locked,
            Kind::Locked,
            "a snapshot on this layer is mounted or backed up: unmount it, and run holdfast container merge",
        ),
        ServerFailure::Damaged => advice(Exit::Damage, Kind::Damage, "holdfast container check shows the damage"),
        ServerFailure::Interrupted => advice(Exit::Error, Kind::Interrupted, "holdfast container merge continues"),
        ServerFailure::NotFrozen => advice(
            Exit::Error,
            Kind::Refused,
            "use --no-freeze for a snapshot of the disk as after a power failure",
        ),
        ServerFailure::Io => plain(Exit::Error, Kind::Io),
    }
}

fn loop_device_advice(kind: std::io::ErrorKind) -> Advice {
    match kind {
        std::io::ErrorKind::PermissionDenied => advice(
            Exit::Error,
            Kind::Permission,
            "run it as root, or use --disk to get the disk as a raw file",
        ),
        _ => advice(
            Exit::Error,
            Kind::Unsupported,
            "the kernel module loop, of Linux 5.8 or later, is needed (modprobe loop); --disk gives the disk as a raw file",
        ),
    }
}

fn nbd_device_advice(kind: std::io::ErrorKind) -> Advice {
    match kind {
        std::io::ErrorKind::PermissionDenied => advice(Exit::Error, Kind::Permission, "run it as root"),
        _ => advice(
            Exit::Error,
            Kind::Unsupported,
            "the kernel module nbd, of Linux 5.14 or later, is needed (modprobe nbd); without --through nbd, the disk is served over FUSE",
        ),
    }
}
