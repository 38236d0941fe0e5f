//! What to do about errors of machine archives.

use std::io::ErrorKind;

use holdfast_archive::Error as ArchiveError;
use holdfast_engine::ExchangeError;

use super::advice::{advice, device_advice, image_advice, io_advice};
use super::{Advice, Kind};
use crate::exit::Exit;

pub(super) fn archive_advice(error: &ArchiveError) -> Advice {
    match error {
        ArchiveError::Corrupt { .. } => damaged(),
        ArchiveError::Read { source, .. } if source.kind() == ErrorKind::InvalidData => damaged(),
        ArchiveError::Read { source, .. } if source.kind() == ErrorKind::UnexpectedEof => cut_off(),
        ArchiveError::CutOff { .. } => cut_off(),
        ArchiveError::Spool { source, .. } if source.kind() == ErrorKind::StorageFull => advice(
            Exit::Error,
            Kind::NoSpace,
            "make room there, or set TMPDIR to a folder that has it",
        ),
        ArchiveError::Read { source, .. } | ArchiveError::Write { source, .. } | ArchiveError::Spool { source, .. } => {
            io_advice(source)
        }
        ArchiveError::NoIndex => advice(
            Exit::Error,
            Kind::Unsupported,
            "it can only be read from its start: holdfast compress --decompress",
        ),
        ArchiveError::InvalidOption { .. } => advice(
            Exit::Usage,
            Kind::Usage,
            "holdfast export --help and holdfast compress --help show what can be",
        ),
        ArchiveError::Device(error) => device_advice(error),
        ArchiveError::Image(error) => image_advice(error),
        _ => advice(
            Exit::Error,
            Kind::Unsupported,
            "holdfast import --help lists the archives that are known",
        ),
    }
}

fn cut_off() -> Advice {
    advice(
        Exit::Damage,
        Kind::Damage,
        "whoever sent it was interrupted, or its medium was full: have it sent again",
    )
}

fn damaged() -> Advice {
    advice(
        Exit::Damage,
        Kind::Damage,
        "have it exported again; nothing of it was kept",
    )
}

pub(super) fn exchange_advice(error: &ExchangeError) -> Advice {
    match error {
        ExchangeError::NoMachine { .. } => advice(
            Exit::Error,
            Kind::Unsupported,
            "holdfast backup takes its disks by themselves",
        ),
        ExchangeError::NoSuchDisk { .. } => advice(Exit::Error, Kind::NotFound, "check the names after --exclude"),
        ExchangeError::Name { .. } => advice(
            Exit::Error,
            Kind::BadName,
            "give it a name of yours with --machine NAME",
        ),
        ExchangeError::NoDisk { .. } => advice(Exit::Error, Kind::NotFound, "name a snapshot of a machine with disks"),
        ExchangeError::FolderTaken { .. } => advice(Exit::Error, Kind::Exists, "name a new folder, or an empty one"),
        _ => advice(Exit::Error, Kind::Io, "please report it"),
    }
}
