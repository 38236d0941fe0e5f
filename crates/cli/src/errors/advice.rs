//! Maps kinds of errors to an exit code, a word for scripts, and a hint.
//!
//! The words are listed in `docs/json.md`; scripts depend on them.

mod containers;
mod exchange;
mod guest_files;
mod images;
mod machines;
mod passwords;
mod pools;
mod providers;
mod refusals;
mod servers;
mod templates;

use holdfast_archive::Error as ArchiveError;
use holdfast_block::Error as DeviceError;
use holdfast_engine::{Error as JobError, ResolveError, SnapshotChoiceError};
use holdfast_hardware::Error as HardwareError;
use holdfast_image::Error as ImageError;
use holdfast_repo::Error as RepositoryError;
use holdfast_repo::key::KeyError;
use holdfast_repo::store::StoreError;

use self::exchange::{archive_advice, exchange_advice};
use self::images::{clone_advice, image_advice, io_advice};
use self::machines::machine_advice;
use self::passwords::password_advice;
use self::pools::xen_advice;
use self::servers::{server_advice, serving_advice};
use self::templates::template_advice;
use super::{Error, Kind};
use crate::exit::Exit;
use crate::process::environment;

const HINT_DAMAGE: &str = "holdfast scrub lists all damage, and holdfast repair repairs what it can";
const HINT_LOSS: &str = "complete an interrupted copy, or put the missing objects back; holdfast repair restores what it can; \
                         holdfast gc --accept-loss SNAPSHOT (or all) accepts the loss";
const HINT_OBSTRUCTED: &str = "move it away; holdfast repair restores what it can";
const HINT_FOLDER: &str =
    "links inside a repository are not followed: move the whole repository to the other disk, and link to that";
const HINT_EXCHANGED: &str =
    "find out why it was replaced; if this was intended, set HOLDFAST_ACCEPT_REPOSITORY to its id for one run";
const HINT_LOCATION: &str =
    "check the location (--repository, or --to of holdfast copy); holdfast init creates a repository";
const HINT_READ_ONLY: &str =
    "all snapshots can still be read: list, restore and verify work; to change it, mount it writable";
const HINT_STORE_FULL: &str = "stored data is intact; free some space, or remove snapshots by holdfast prune and free their space by holdfast \
     gc: gc --repack-below 0 needs almost no space itself";
const HINT_TOO_SMALL: &str = "make the target at least as large as the disk";
const HINT_WRITE_ANEW: &str =
    "--force instead of --in-place writes a new image in its place; if it is a raw disk, use --format raw";
pub(super) const HINT_PERMISSION: &str = "run it as root, or as a user who has the permission";

/// The advice on an error.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Advice {
    /// The exit code.
    pub exit: Exit,
    /// A stable word for scripts.
    pub kind: Kind,
    /// What the user can do next.
    pub hint: Option<String>,
}

impl Error {
    /// The advice on this error.
    pub fn advice(&self) -> Advice {
        match self {
            Self::NoRepositoryOfName { .. } => advice(
                Exit::Error,
                Kind::NotFound,
                "name the folder of a repository, or a section [repositories.NAME]; holdfast init creates a repository",
            ),
            Self::NoRepository => advice(
                Exit::Usage,
                Kind::NoRepository,
                format!(
                    "use --repository LOCATION, set {}, or define one repository in holdfast.toml",
                    environment::REPOSITORY
                ),
            ),
            Self::NotObeyed { .. } => advice(
                Exit::Error,
                Kind::Refused,
                "it controls what is done here, so it must belong to root (or to you), with all folders above it, and be writable only by its owner: chown root FILE, chmod go-w FILE",
            ),
            Self::NoJson { .. } => advice(Exit::Usage, Kind::Usage, "leave --json out"),
            Self::Password(error) => password_advice(error),
            Self::Name(_) => advice(
                Exit::Usage,
                Kind::BadName,
                "a snapshot is named by its id, or as MACHINE, MACHINE@latest or MACHINE@2026-11-20T10:00, and a disk of it with :DISK",
            ),
            Self::Resolve(error) => resolve_advice(error),
            Self::Interrupted(_) => plain(Exit::Error, Kind::Interrupted),
            Self::Device(error) => device_advice(error),
            Self::Store(error) => store_advice(error),
            Self::Key(error) => key_advice(error),
            Self::Engine(error) => engine_advice(error),
            Self::Usage { hint, .. } => advice(Exit::Usage, Kind::Usage, hint.clone()),
            Self::Refused { kind, hint, .. } => advice(Exit::Error, *kind, hint.clone()),
            Self::Server(error) => server_advice(error.kind),
            Self::Simulation(_) => advice(
                Exit::Usage,
                Kind::Usage,
                "use fewer days (--days), or a calendar with fewer snapshots (--every)",
            ),
            Self::NoMachines { .. } => advice(
                Exit::Error,
                Kind::NotFound,
                "holdfast machines shows the machines, and their tags",
            ),
            Self::File { source, .. } | Self::Stdout(source) | Self::Stdin(source) => io_advice(source),
            Self::Json(_) | Self::Signals(_) => plain(Exit::Error, Kind::Io),
        }
    }
}

fn resolve_advice(error: &ResolveError) -> Advice {
    match error {
        ResolveError::Ambiguous { .. } => advice(Exit::Error, Kind::Ambiguous, "use more digits of the id"),
        ResolveError::SeveralMachines { .. } => advice(Exit::Error, Kind::Ambiguous, "name the snapshot by its id"),
        ResolveError::NoSnapshots => advice(Exit::Error, Kind::NotFound, "holdfast backup makes one"),
        ResolveError::PrefixTooShort { .. } => plain(Exit::Usage, Kind::BadName),
        _ => advice(Exit::Error, Kind::NotFound, "holdfast list shows the existing ones"),
    }
}

fn engine_advice(error: &JobError) -> Advice {
    let refused = |hint: &str| advice(Exit::Error, Kind::Refused, hint);
    match error {
        JobError::Repository(error) => repository_advice(error),
        JobError::Image(error) => image_advice(error),
        JobError::Archive(error) => archive_advice(error),
        JobError::Hardware(HardwareError::Malformed { .. }) => advice(
            Exit::Damage,
            Kind::Damage,
            "the description of the machine is damaged, or has another format than its name",
        ),
        JobError::Hardware(HardwareError::SeveralMachines { .. }) => advice(
            Exit::Error,
            Kind::Unsupported,
            "export each machine separately, or remove the others from the descriptor",
        ),
        JobError::Hardware(_) => advice(Exit::Error, Kind::Unsupported, "what it was made of is not understood"),
        JobError::Exchange(error) => exchange_advice(error),
        JobError::Xen(error) => xen_advice(error),
        JobError::Template(error) => template_advice(error),
        JobError::DiskDoesNotFit { .. } => advice(
            Exit::Error,
            Kind::Unsupported,
            "choose another format for the image; raw and qcow2 hold the largest disks",
        ),
        JobError::Scheme { .. } => advice(
            Exit::Usage,
            Kind::Unsupported,
            "use the path of a directory; if its name has a colon, start with ./",
        ),
        JobError::NotEmpty { .. } => advice(
            Exit::Error,
            Kind::Exists,
            "use an empty directory, or one that does not exist yet",
        ),
        JobError::WeakPassword { .. } => advice(
            Exit::Error,
            Kind::WeakPassword,
            "four or five unrelated words make a good password that is easy to type",
        ),
        JobError::NoSlotUsed => advice(
            Exit::Error,
            Kind::Key,
            "holdfast key add adds a password, and holdfast key remove removes one",
        ),
        JobError::NoMachineName => advice(Exit::Usage, Kind::Usage, "use --machine NAME"),
        JobError::DuplicateDisk { .. } => advice(Exit::Usage, Kind::Usage, "give each disk its name with NAME=PATH"),
        JobError::Clone(error) => clone_advice(error),
        JobError::StreamLonger { .. } => advice(Exit::Error, Kind::Refused, "set the size that it has with --size"),
        JobError::StandardInputTwice => advice(Exit::Usage, Kind::Usage, "give - once"),
        JobError::FormatChanged { .. } => {
            refused("if you know that the image is not raw any more, set its format with --format")
        }
        JobError::NoSize => advice(Exit::Usage, Kind::Usage, "set a size such as 20G"),
        JobError::Choice(error) => choice_advice(error),
        JobError::Exchanged(_) => advice(Exit::Error, Kind::Refused, HINT_EXCHANGED),
        JobError::NameTaken(_) => advice(
            Exit::Error,
            Kind::Exists,
            "--machine NAME stores it under another name; if it is the same machine, created again, --same-machine continues these snapshots",
        ),
        JobError::CompareOne => advice(Exit::Usage, Kind::Usage, "name one snapshot with --against"),
        JobError::SeveralDisks { .. } => advice(
            Exit::Error,
            Kind::Ambiguous,
            "name one as SNAPSHOT:DISK, or restore into an existing folder",
        ),
        _ => target_advice(error),
    }
}

/// Errors of targets.
fn target_advice(error: &JobError) -> Advice {
    let refused = |hint: &str| advice(Exit::Error, Kind::Refused, hint);
    match error {
        JobError::TargetExists { .. } => advice(
            Exit::Error,
            Kind::Exists,
            "use another name; --force, where a command has it, replaces the file, and restore --in-place writes only the differences into it",
        ),
        JobError::Serve(holdfast_serve::Error::SocketCount { .. }) => advice(
            Exit::Usage,
            Kind::Usage,
            "name one disk as SNAPSHOT:DISK, or give a folder for sockets with --sockets FOLDER",
        ),
        JobError::Serving(error) => serving_advice(error),
        JobError::OverlayInUse { .. } => advice(
            Exit::Locked,
            Kind::Locked,
            "end that server first, or store the writes in another folder",
        ),
        JobError::DeviceInUse { .. } => advice(
            Exit::Locked,
            Kind::Locked,
            "end that program first; if it was started while the disk was written, restore again",
        ),
        JobError::DeviceExists { .. } => advice(
            Exit::Error,
            Kind::Exists,
            "--force overwrites it; restore --in-place writes only the differences",
        ),
        JobError::DeviceFormat { .. } => advice(Exit::Usage, Kind::Usage, "use --to raw, or name a new file"),
        JobError::TargetTooSmall { .. } => advice(Exit::Error, Kind::NoSpace, HINT_TOO_SMALL),
        JobError::Medium { source, .. } => device_advice(source),
        JobError::NoTarget { .. } => advice(Exit::Error, Kind::NotFound, "leave --in-place out to make it"),
        JobError::TargetDamaged { source, .. } => Advice {
            hint: Some(HINT_WRITE_ANEW.to_owned()),
            ..image_advice(source)
        },
        JobError::TargetNotAnImage { .. } => refused(HINT_WRITE_ANEW),
        JobError::NotAFile { .. } => refused("give the name of a new file"),
        JobError::DataFileExists { .. } => advice(Exit::Error, Kind::Exists, "give another --data-file, or remove it"),
        JobError::TargetIsSource { .. } => refused("give the new image another name, and rename it later"),
        JobError::WrittenWrong { .. } => advice(
            Exit::Damage,
            Kind::Damage,
            "nothing was stored; the disk, the memory or the machine itself may be faulty",
        ),
        JobError::TargetFormat { .. } => {
            refused("restore to a new file; or use --format raw, if this is a raw disk that only looks so")
        }
        _ => machine_advice(error),
    }
}

fn repository_advice(error: &RepositoryError) -> Advice {
    match error {
        RepositoryError::Store(error) => store_advice(error),
        RepositoryError::Key(error) => key_advice(error),
        RepositoryError::Loss { .. } => advice(Exit::Damage, Kind::Damage, HINT_LOSS),
        error if error.is_damage() => advice(Exit::Damage, Kind::Damage, HINT_DAMAGE),
        RepositoryError::FutureVersion { .. } => advice(Exit::Error, Kind::NewerFormat, "use a newer holdfast"),
        RepositoryError::NotARepository { .. } => advice(Exit::Error, Kind::NoSuchRepository, HINT_LOCATION),
        RepositoryError::AlreadyARepository { .. } => advice(
            Exit::Error,
            Kind::Exists,
            "use it as it is, or give another --repository",
        ),
        RepositoryError::NoSnapshot { .. } => {
            advice(Exit::Error, Kind::NotFound, "holdfast list shows the existing ones")
        }
        RepositoryError::NoDisk { .. } => advice(Exit::Error, Kind::NotFound, "name the disk as SNAPSHOT:DISK"),
        RepositoryError::Locked { .. } => advice(Exit::Locked, Kind::Locked, "try again when that has ended"),
        RepositoryError::Revoked { .. } => advice(
            Exit::Error,
            Kind::Io,
            "its process did not respond for so long that it was considered dead; run it again",
        ),
        RepositoryError::Protected { .. } => {
            advice(Exit::Error, Kind::Refused, "holdfast unprotect lets it be removed")
        }
        RepositoryError::Device { source, .. } => device_advice(source),
        RepositoryError::Stream { source, .. } => io_advice(source),
        RepositoryError::TargetTooSmall { .. } => advice(Exit::Error, Kind::NoSpace, HINT_TOO_SMALL),
        RepositoryError::Limit { .. } => plain(Exit::Error, Kind::Unsupported),
        _ => plain(Exit::Error, Kind::Io),
    }
}

fn choice_advice(error: &SnapshotChoiceError) -> Advice {
    match error {
        SnapshotChoiceError::NotProtected { .. } | SnapshotChoiceError::NoneProtected { .. } => advice(
            Exit::Error,
            Kind::NotFound,
            "holdfast list shows which snapshots are protected",
        ),
        SnapshotChoiceError::SeveralProtected { .. } => {
            advice(Exit::Error, Kind::Ambiguous, "name the snapshot by its id")
        }
        _ => advice(Exit::Error, Kind::Refused, "name it by its id, or as MACHINE@TIME"),
    }
}

pub(crate) fn device_advice(error: &DeviceError) -> Advice {
    match error {
        DeviceError::Io { source, .. } | DeviceError::Path { source, .. } => io_advice(source),
        DeviceError::Corrupt { .. } => plain(Exit::Damage, Kind::Damage),
        DeviceError::Unsupported { .. } => plain(Exit::Error, Kind::Unsupported),
        // For a device on top of a repository, the repository's error decides.
        DeviceError::Layer(inner) => inner
            .downcast_ref::<StoreError>()
            .map(store_advice)
            .or_else(|| inner.downcast_ref::<KeyError>().map(key_advice))
            .or_else(|| inner.downcast_ref::<RepositoryError>().map(repository_advice))
            .or_else(|| inner.downcast_ref::<ImageError>().map(image_advice))
            .or_else(|| inner.downcast_ref::<ArchiveError>().map(archive_advice))
            .unwrap_or_else(|| plain(Exit::Error, Kind::Io)),
        _ => plain(Exit::Error, Kind::Io),
    }
}

fn store_advice(error: &StoreError) -> Advice {
    match error {
        StoreError::TooLarge { .. } | StoreError::ShortObject { .. } => advice(Exit::Damage, Kind::Damage, HINT_DAMAGE),
        StoreError::NoStore { .. } => advice(Exit::Error, Kind::NoSuchRepository, HINT_LOCATION),
        StoreError::NotFound { .. } => plain(Exit::Error, Kind::NotFound),
        StoreError::ReadOnly { .. } => advice(Exit::Error, Kind::Permission, HINT_READ_ONLY),
        StoreError::NotAnObject { .. } => advice(Exit::Damage, Kind::Damage, HINT_OBSTRUCTED),
        StoreError::NotAFolder { .. } => advice(Exit::Error, Kind::Unsupported, HINT_FOLDER),
        StoreError::Permission { .. } => advice(Exit::Error, Kind::Permission, HINT_PERMISSION),
        StoreError::NoSpace { .. } => advice(Exit::Error, Kind::NoSpace, HINT_STORE_FULL),
        StoreError::Unsupported { .. } => plain(Exit::Error, Kind::Unsupported),
        error if error.is_retryable() => advice(Exit::Error, Kind::Io, "this may pass: try again in a while"),
        StoreError::Io { source, .. } => io_advice(source),
        _ => plain(Exit::Error, Kind::Io),
    }
}

fn key_advice(error: &KeyError) -> Advice {
    match error {
        KeyError::Store(error) => store_advice(error),
        KeyError::Damaged { .. } | KeyError::WrongPurpose { .. } | KeyError::WrongKeyOrDamaged { .. } => {
            advice(Exit::Damage, Kind::Damage, HINT_DAMAGE)
        }
        KeyError::Version { .. } | KeyError::PaperKeyVersion { .. } => {
            advice(Exit::Error, Kind::NewerFormat, "use a newer holdfast")
        }
        KeyError::NoSlots { .. } => advice(Exit::Error, Kind::NoSuchRepository, HINT_LOCATION),
        KeyError::WrongCredential { .. } | KeyError::NoSlotFor { .. } => advice(
            Exit::Error,
            Kind::WrongPassword,
            "check that this is the password of this repository; its paper key opens it too",
        ),
        KeyError::Credential { .. } => plain(Exit::Error, Kind::Password),
        KeyError::SlotsNotTried { .. } | KeyError::TooManySlots { .. } => advice(
            Exit::Error,
            Kind::Key,
            "use --key-slot ID with your own slot (holdfast key list shows it), or the paper key; and delete the files that others have put into keys/",
        ),
        KeyError::NoSuchSlot { .. } => advice(Exit::Error, Kind::NotFound, "holdfast key list shows the key slots"),
        KeyError::LastSlot { .. } => advice(
            Exit::Error,
            Kind::Refused,
            "add another key first, with holdfast key add",
        ),
        KeyError::NoPaperKey { .. }
        | KeyError::PaperKeyGroupLength { .. }
        | KeyError::PaperKeyLength { .. }
        | KeyError::PaperKeyCharacter { .. }
        | KeyError::PaperKeyGroup { .. }
        | KeyError::PaperKeyMixed => advice(
            Exit::Error,
            Kind::WrongPassword,
            "compare with the paper, group by group",
        ),
        _ => plain(Exit::Error, Kind::Key),
    }
}

pub(super) fn advice(exit: Exit, kind: Kind, hint: impl Into<String>) -> Advice {
    Advice {
        exit,
        kind,
        hint: Some(hint.into()),
    }
}

pub(super) fn plain(exit: Exit, kind: Kind) -> Advice {
    Advice { exit, kind, hint: None }
}

#[cfg(test)]
mod tests {
    use std::io::ErrorKind;

    use holdfast_block::Error as DeviceError;
    use holdfast_repo::key::KeyError;
    use holdfast_repo::store::{ObjectName, StoreError};

    use super::{Error, Kind};
    use crate::errors::PasswordError;
    use crate::exit::Exit;

    #[test]
    fn what_a_person_can_mend_has_a_hint() {
        let full = Error::Stdout(ErrorKind::StorageFull.into());
        assert_eq!(
            full.advice().hint.as_deref(),
            Some("free space on the target and try again")
        );
        let lost = Error::Password(PasswordError::NoTerminal).advice();
        assert_eq!((lost.exit, lost.kind), (Exit::Usage, Kind::NoPassword));
        for way in [
            "--password-file",
            "--password-command",
            "HOLDFAST_PASSWORD_FILE",
            "systemd",
        ] {
            assert!(lost.hint.as_deref().unwrap().contains(way), "{way}");
        }
    }

    /// Damage is reported as damage at every depth of the error chain, so that monitoring scripts detect it.
    #[test]
    fn damage_is_damage_at_every_depth() {
        let short = || StoreError::TooLarge {
            name: ObjectName::config(),
            length: 2,
            length_max: 1,
        };
        let corrupt = DeviceError::Corrupt {
            what: "bitmap",
            offset: 0,
            detail: String::new(),
        };
        for error in [
            Error::Device(corrupt),
            Error::Store(short()),
            Error::Key(KeyError::Store(short())),
            Error::Device(DeviceError::layer(short())),
            Error::Device(DeviceError::layer(KeyError::Store(short()))),
        ] {
            let advice = error.advice();
            assert_eq!((advice.exit, advice.kind), (Exit::Damage, Kind::Damage), "{error}");
        }
    }

    #[test]
    fn a_store_that_may_recover_is_no_damage() {
        let io = |kind: ErrorKind| {
            Error::Store(StoreError::Io {
                store: "/r".to_owned(),
                action: "read",
                subject: "x".to_owned(),
                source: kind.into(),
            })
        };
        let advice = io(ErrorKind::TimedOut).advice();
        assert_eq!((advice.exit, advice.kind), (Exit::Error, Kind::Io));
        assert!(advice.hint.unwrap().contains("try again"));
        assert_eq!(io(ErrorKind::InvalidData).advice().hint, None);
    }
}
