//! Advice on files inside the guests' file systems.

use holdfast_appliance::ApplianceError;
use holdfast_engine::GuestFilesError;
use holdfast_guest_files::Error as ReadError;

use super::{Advice, advice, device_advice, plain};
use crate::errors::Kind;
use crate::exit::Exit;

/// What reads every file system.
const HINT_MACHINE: &str = "attach the disk to a virtual machine that knows it: holdfast serve nbd serves it, and holdfast restore writes it to a \
     file";

pub(super) fn guest_files_advice(error: &GuestFilesError) -> Advice {
    match error {
        GuestFilesError::NoVolume { .. } => advice(
            Exit::Error,
            Kind::NotFound,
            "holdfast files ls SNAPSHOT lists the volumes",
        ),
        GuestFilesError::Ambiguous { .. } => advice(
            Exit::Error,
            Kind::Ambiguous,
            "name the volume: SNAPSHOT:DISK:VOLUME:/PATH",
        ),
        GuestFilesError::NoReader { .. } | GuestFilesError::Unreadable { .. } => {
            advice(Exit::Error, Kind::Unsupported, HINT_MACHINE)
        }
        GuestFilesError::NeedsAppliance { source, .. } => guest_files_advice(source),
        GuestFilesError::Appliance(error) => appliance_advice(error),
        GuestFilesError::TooManyDisks { .. } => advice(Exit::Error, Kind::Refused, HINT_MACHINE),
        GuestFilesError::Passphrase { .. } => advice(
            Exit::Error,
            Kind::Usage,
            "use --luks-password-file or --luks-password-command, or set HOLDFAST_LUKS_PASSWORD_FILE",
        ),
        GuestFilesError::NoSuchPath { unread, .. } if unread.is_empty() => advice(
            Exit::Error,
            Kind::NotFound,
            "holdfast files ls lists the volumes and their files",
        ),
        GuestFilesError::NoSuchPath { .. } => advice(Exit::Error, Kind::NotFound, HINT_MACHINE),
        GuestFilesError::NoPath => advice(
            Exit::Usage,
            Kind::Usage,
            "add it to the snapshot: SNAPSHOT:/PATH; / is a whole volume",
        ),
        GuestFilesError::Read { source, .. } => read_advice(source),
        _ => plain(Exit::Error, Kind::Io),
    }
}

/// What an appliance needs.
fn appliance_advice(error: &ApplianceError) -> Advice {
    let unsupported = |hint| advice(Exit::Error, Kind::Unsupported, hint);
    match error {
        ApplianceError::NoQemu { .. } => {
            unsupported("install QEMU (Debian: qemu-system-x86, Fedora: qemu-system-x86-core, RHEL: qemu-kvm)")
        }
        ApplianceError::NoKernel | ApplianceError::NoModules { .. } | ApplianceError::NoModule { .. } => unsupported(
            "install a kernel with its modules (Debian: linux-image-cloud-amd64 or linux-image-amd64), or name one: \
             --appliance-kernel FILE; Ubuntu lets only root read the kernels in /boot",
        ),
        ApplianceError::NotAKernel { .. } => unsupported("name a bzImage, like /boot/vmlinuz-VERSION"),
        ApplianceError::NoProgram { program: "lvm", .. } => unsupported("install lvm2 to read volumes of LVM"),
        ApplianceError::NoProgram { .. } => {
            unsupported("install cryptsetup (Debian: cryptsetup-bin) to read volumes that LUKS encrypts")
        }
        _ => plain(Exit::Error, Kind::Io),
    }
}

fn read_advice(error: &ReadError) -> Advice {
    match error {
        ReadError::Device(error) => device_advice(error),
        ReadError::NotFound => plain(Exit::Error, Kind::NotFound),
        ReadError::Damaged { .. } => advice(
            Exit::Error,
            Kind::Unsupported,
            "the guest's file system is damaged, or was in use; the snapshot itself can be checked by holdfast verify",
        ),
        ReadError::Unsupported { .. } => advice(Exit::Error, Kind::Unsupported, HINT_MACHINE),
        ReadError::NotADirectory | ReadError::NotAFile | ReadError::LinkLoop | ReadError::TooLarge { .. } => {
            plain(Exit::Error, Kind::Refused)
        }
        _ => plain(Exit::Error, Kind::Io),
    }
}
