//! The advice on errors of a copy.

use holdfast_live_copy::{Error as CopyError, RefusalKind};
use holdfast_serve::nbd::client::Error as NbdError;

use crate::errors::{Error, Kind};

/// The advice on errors of a copy.
pub(super) fn copy_error(error: CopyError) -> Error {
    let text = holdfast_block::error_text(&error);
    let refused = |kind, hint: &'static str| Error::refused(kind, text.clone(), hint);
    let of_kind = |kind| match kind {
        RefusalKind::Exists => refused(
            Kind::Exists,
            "--force replaces a file when the copy is complete, and overwrites a block device or an export at once",
        ),
        RefusalKind::NoSpace => refused(Kind::NoSpace, "make room there, or name another target"),
        RefusalKind::Locked => refused(Kind::Locked, "wait until the other program has ended"),
        RefusalKind::OtherCopy => refused(Kind::Refused, "--restart deletes what is there; or name another target"),
        RefusalKind::Seed => refused(Kind::Refused, "name another seed with --seed, or none"),
        RefusalKind::NotAllowed => refused(Kind::Refused, "name another target"),
        RefusalKind::OtherVersion => refused(Kind::Unsupported, "install the same version of holdfast on both hosts"),
        RefusalKind::Io => refused(Kind::Io, "look at the target; the same command continues the copy"),
    };
    match error {
        CopyError::Engine(error) => error.into(),
        CopyError::Refused { kind, .. } => of_kind(kind),
        CopyError::TargetExists { .. } | CopyError::ExportOverwritten { .. } => of_kind(RefusalKind::Exists),
        CopyError::Export(NbdError::ReadOnly { .. }) => refused(
            Kind::Refused,
            "let the server offer it writable, or name another export",
        ),
        CopyError::Export(_) => refused(Kind::Io, "check the address, and that the server runs"),
        CopyError::ExportNotDurable { .. } => refused(
            Kind::Refused,
            "let the server offer flush (nbd-server: flush = true), or name another export",
        ),
        CopyError::TargetKind { .. } | CopyError::TargetElsewhere { .. } | CopyError::TargetFormat { .. } => {
            of_kind(RefusalKind::NotAllowed)
        }
        CopyError::Seed { .. } => of_kind(RefusalKind::Seed),
        CopyError::NoSpace { .. } | CopyError::SeedNoSpace { .. } => of_kind(RefusalKind::NoSpace),
        CopyError::TargetBusy { .. } | CopyError::TargetInUse { .. } => of_kind(RefusalKind::Locked),
        CopyError::OtherSize { .. } | CopyError::Journal { .. } | CopyError::PartialImage { .. } => {
            of_kind(RefusalKind::OtherCopy)
        }
        CopyError::Request { .. } | CopyError::Protocol { .. } => of_kind(RefusalKind::OtherVersion),
        CopyError::NotConverging(_) | CopyError::FrozenTooLong { .. } => refused(
            Kind::Refused,
            "permit more time with --max-frozen, or copy when less is written; the source runs, and the same command continues the copy",
        ),
        CopyError::Command { .. } => refused(Kind::Refused, "look at what the command says, and call it by hand"),
        CopyError::Program { .. } | CopyError::ConnectionRefused { .. } | CopyError::Connection { .. } => refused(
            Kind::Io,
            "install holdfast there, where ssh finds it; a --connect-command must reach a receiver that waits",
        ),
        CopyError::File { action, path, source } => Error::File { action, path, source },
        _ => of_kind(RefusalKind::Io),
    }
}
