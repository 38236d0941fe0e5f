//! Advice on containers.

use holdfast_engine::{ContainerError, ServerFailure};

use super::{Advice, advice, plain};
use crate::errors::Kind;
use crate::exit::Exit;

pub(super) fn container_advice(error: &ContainerError) -> Advice {
    match error {
        ContainerError::Exists { .. } => advice(Exit::Error, Kind::Exists, "name a new folder"),
        ContainerError::NoFileSystem { .. } => advice(
            Exit::Error,
            Kind::Unsupported,
            "use --disk to mount the disk as a raw file; ext4, XFS and btrfs can be mounted, on the disk itself or in one partition",
        ),
        ContainerError::Program { package, .. } => {
            advice(Exit::Error, Kind::Io, format!("the package {package} has the program"))
        }
        ContainerError::LoopDevice { source, .. } if source.kind() == std::io::ErrorKind::PermissionDenied => advice(
            Exit::Error,
            Kind::Permission,
            "run it as root, or use --disk to get the disk as a raw file",
        ),
        ContainerError::LoopDevice { .. } => advice(
            Exit::Error,
            Kind::Unsupported,
            "the kernel module loop, of Linux 5.8 or later, is needed (modprobe loop); --disk gives the disk as a raw file",
        ),
        ContainerError::Mount { .. } => advice(
            Exit::Error,
            Kind::Io,
            "dmesg shows the reason of the kernel; holdfast container check checks the layers, and fsck the disk of --disk",
        ),
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
        ContainerError::NotMounted { .. } => advice(
            Exit::Error,
            Kind::Refused,
            "holdfast container info shows where a container is mounted",
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
        ContainerError::OtherVersion { .. } => advice(
            Exit::Error,
            Kind::Unsupported,
            "unmount the container, and mount it again with this program",
        ),
        ContainerError::Server { failure, .. } => server_advice(*failure),
        _ => plain(Exit::Error, Kind::Io),
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
