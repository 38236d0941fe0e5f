//! Advice on errors of machine archives.

use std::io::ErrorKind;

use holdfast_archive::Error as ArchiveError;
use holdfast_engine::{ExchangeError, VirtualBoxError};

use super::Advice;
use super::images::{image_advice, io_advice};
use super::{advice, device_advice};
use crate::errors::Kind;
use crate::exit::Exit;

pub(super) fn archive_advice(error: &ArchiveError) -> Advice {
    match error {
        ArchiveError::Corrupt { .. } => damaged(),
        ArchiveError::Read { source, .. } if source.kind() == ErrorKind::InvalidData => damaged(),
        ArchiveError::Read { source, .. } if source.kind() == ErrorKind::UnexpectedEof => cut_off(),
        ArchiveError::CutOff { .. } => cut_off(),
        ArchiveError::Spool { source, .. } => Advice {
            hint: Some(
                if matches!(source.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded) {
                    "free space there, or set TMPDIR to a folder with more space".to_owned()
                } else {
                    "set TMPDIR to a writable folder with space for a disk".to_owned()
                },
            ),
            ..io_advice(source)
        },
        ArchiveError::Read { source, .. } | ArchiveError::Write { source, .. } => io_advice(source),
        ArchiveError::NoIndex => advice(
            Exit::Error,
            Kind::Unsupported,
            "it can only be read from its start: decompress it first by holdfast compress --decompress",
        ),
        ArchiveError::InvalidOption { .. } => advice(
            Exit::Usage,
            Kind::Usage,
            "holdfast export --help and holdfast compress --help list the supported formats",
        ),
        ArchiveError::Device(error) => device_advice(error),
        ArchiveError::Image(error) | ArchiveError::StoredImage { source: error, .. } => image_advice(error),
        _ => advice(
            Exit::Error,
            Kind::Unsupported,
            "holdfast import --help lists the supported archives",
        ),
    }
}

fn cut_off() -> Advice {
    advice(
        Exit::Damage,
        Kind::Damage,
        "the sender was interrupted, or its disk was full: send it again",
    )
}

fn damaged() -> Advice {
    advice(
        Exit::Damage,
        Kind::Damage,
        "export it again, or send it again: the data before this place is not reliable either",
    )
}

pub(super) fn exchange_advice(error: &ExchangeError) -> Advice {
    match error {
        ExchangeError::NoMachine { .. } => advice(
            Exit::Error,
            Kind::Unsupported,
            "holdfast backup can back up its disks without the machine",
        ),
        ExchangeError::NoSuchDisk { .. } => advice(Exit::Error, Kind::NotFound, "check the names after --exclude"),
        ExchangeError::Name { .. } => advice(Exit::Error, Kind::BadName, "choose a name by --machine NAME"),
        ExchangeError::NoDisk { .. } => advice(Exit::Error, Kind::NotFound, "name a snapshot of a machine with disks"),
        ExchangeError::VirtualBox(error) => virtualbox_advice(error),
        ExchangeError::Twin { .. } => advice(
            Exit::Error,
            Kind::Exists,
            "--new-identity imports it as another machine; or remove the existing one first",
        ),
        ExchangeError::Outcome { .. } => advice(
            Exit::Error,
            Kind::Io,
            "check whether it exists before you send it again: holdfast machines xen://HOST",
        ),
        ExchangeError::NoMemory { is_of_qemu, .. } => advice(
            Exit::Error,
            Kind::Unsupported,
            if *is_of_qemu {
                "holdfast restore --to-machine --resume resumes it under libvirt; without --with-memory it starts in the pool"
            } else {
                "holdfast backup --with-memory stores the memory; without --with-memory here, the machine starts from its disks"
            },
        ),
        ExchangeError::NoSuspendedRecords { .. } => advice(
            Exit::Error,
            Kind::Unsupported,
            "an older version has stored it; back it up again with --with-memory, or omit --with-memory here: then the machine starts from its disks",
        ),
        ExchangeError::DiskOfMemory { is_left_out, .. } => advice(
            Exit::Error,
            Kind::Refused,
            if *is_left_out {
                "omit --exclude or --with-memory: the running system in the memory uses all of its disks"
            } else {
                "without --with-memory the machine starts with the existing disks"
            },
        ),
        ExchangeError::Processors { .. } => advice(
            Exit::Error,
            Kind::Refused,
            "the running system in the memory depends on its processors; without --with-memory the machine starts from its disks",
        ),
        ExchangeError::FileTaken { .. } => advice(Exit::Error, Kind::Exists, "--force replaces it"),
        ExchangeError::FolderTaken { .. } => advice(Exit::Error, Kind::Exists, "name a new folder, or an empty one"),
        _ => advice(Exit::Error, Kind::Io, "please report it"),
    }
}

fn virtualbox_advice(error: &VirtualBoxError) -> Advice {
    let refused = |hint: &str| advice(Exit::Error, Kind::Refused, hint);
    match error {
        VirtualBoxError::NoRegistry { .. } => advice(
            Exit::Error,
            Kind::NotFound,
            format!(
                "run it as the user whose machines they are, set {}, or name the settings: vbox:/path/to/NAME.vbox",
                crate::process::environment::VIRTUALBOX_HOME
            ),
        ),
        VirtualBoxError::Ambiguous { .. } => advice(
            Exit::Error,
            Kind::Ambiguous,
            "name it by its UUID, or by the path of its settings: vbox:UUID, vbox:/path/to/NAME.vbox",
        ),
        VirtualBoxError::Settings {
            source: holdfast_hardware::Error::Encrypted { .. },
            ..
        } => refused("remove the encryption first: VBoxManage encryptvm NAME setencryption --old-password FILE"),
        VirtualBoxError::Settings { .. } => advice(
            Exit::Damage,
            Kind::Damage,
            "VirtualBox keeps the settings from before the last change in the same folder, as NAME.vbox-prev",
        ),
        VirtualBoxError::InUse { .. } => advice(
            Exit::Locked,
            Kind::Locked,
            "shut it down first; or run this as the user whose VirtualBox runs it, with VBoxManage in PATH",
        ),
        VirtualBoxError::Changed { .. } => advice(
            Exit::Locked,
            Kind::Locked,
            "back it up again: a running machine is read from a snapshot if VBoxManage is installed",
        ),
        VirtualBoxError::Outside { .. } => {
            refused("if you trust the machine, allow the file or its folder: --allow PATH")
        }
        VirtualBoxError::OtherUser { .. } => {
            refused("run Holdfast as the user that owns it: runuser -u USER -- holdfast ...")
        }
        VirtualBoxError::Encrypted { .. } => refused(
            "remove the encryption first (VBoxManage encryptmedium --oldpassword), or omit the disk by --exclude",
        ),
        VirtualBoxError::Format { .. } => advice(
            Exit::Error,
            Kind::Unsupported,
            "omit the disk by --exclude, or clone it as VDI by VirtualBox",
        ),
        VirtualBoxError::UnknownImage { .. } => {
            refused("check with VBoxManage showvminfo whether the machine can start; or omit the disk by --exclude")
        }
        VirtualBoxError::SameUuid { .. } => {
            refused("holdfast image identity --renew gives a copy of an image a UUID of its own")
        }
        VirtualBoxError::OtherImage { .. } => refused(
            "the file was replaced, or its machine was changed without VirtualBox: VirtualBox cannot start it either",
        ),
        VirtualBoxError::State { machine, word } => state_advice(machine, word),
        VirtualBoxError::NoInstant { .. } => refused("back it up while it is shut off"),
        VirtualBoxError::NoManager { .. } => advice(
            Exit::Error,
            Kind::NotFound,
            "VBoxManage is part of VirtualBox; it must be in PATH",
        ),
        _ => advice(Exit::Error, Kind::Io, "please report it"),
    }
}

/// A crashed machine remains so until it is ended; other states are temporary.
fn state_advice(machine: &str, word: &str) -> Advice {
    if word == "gurumeditation" {
        return advice(
            Exit::Error,
            Kind::Refused,
            format!(
                "it has crashed in VirtualBox: end it (VBoxManage controlvm '{machine}' poweroff), then it can be read"
            ),
        );
    }
    advice(Exit::Locked, Kind::Locked, "try again when it runs, or is shut off")
}
