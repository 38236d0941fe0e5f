//! The advice on errors of a copy.

use holdfast_live_copy::{Error as CopyError, RefusalKind};

use crate::errors::{Error, Kind};

/// The advice on errors of a copy.
pub(in crate::commands::moving) fn copy_error(error: CopyError) -> Error {
    let text = holdfast_block::error_text(&error);
    let refused = |kind, hint: &'static str| Error::refused(kind, text.clone(), hint);
    let of_kind = |kind| match kind {
        RefusalKind::Exists => refused(
            Kind::Exists,
            "--force replaces a file when the copy is complete, and overwrites a block device at once",
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
        CopyError::TargetExists { .. } => of_kind(RefusalKind::Exists),
        CopyError::TargetKind { .. } | CopyError::TargetElsewhere { .. } => of_kind(RefusalKind::NotAllowed),
        CopyError::Seed { .. } => of_kind(RefusalKind::Seed),
        CopyError::NoSpace { .. } | CopyError::SeedNoSpace { .. } => of_kind(RefusalKind::NoSpace),
        CopyError::TargetBusy { .. } | CopyError::TargetInUse { .. } => of_kind(RefusalKind::Locked),
        CopyError::OtherSize { .. } | CopyError::Journal { .. } => of_kind(RefusalKind::OtherCopy),
        CopyError::Request { .. } | CopyError::Protocol { .. } => of_kind(RefusalKind::OtherVersion),
        CopyError::NotConverging(_) | CopyError::FrozenTooLong { .. } => refused(
            Kind::Refused,
            "permit more time with --max-frozen, or copy when less is written; the source runs, and the same command continues the copy",
        ),
        CopyError::Command { .. } => refused(Kind::Refused, "look at what the command says, and call it by hand"),
        CopyError::Program { .. } => refused(Kind::Io, "install holdfast there, where ssh finds it"),
        CopyError::File { action, path, source } => Error::File { action, path, source },
        _ => of_kind(RefusalKind::Io),
    }
}
