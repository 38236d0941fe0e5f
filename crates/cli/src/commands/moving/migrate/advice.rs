//! The advice on errors of a migration.

use holdfast_block::error_text;
use holdfast_migration::Error as MigrationError;

use super::super::copy_advice::copy_error;
use crate::errors::{Error, Kind};

/// The advice on errors of a migration.
pub(super) fn migration_error(error: MigrationError) -> Error {
    let text = error_text(&error);
    let refused = |kind, hint: &'static str| Error::refused(kind, text.clone(), hint);
    match error {
        MigrationError::Engine(error) => (*error).into(),
        MigrationError::Disk { source, .. } => copy_error(*source),
        MigrationError::FarHost { .. } => refused(
            Kind::Io,
            "install holdfast there, where ssh or the --connect-command finds it, and libvirt for a machine of libvirt; the machine stays \
             here",
        ),
        MigrationError::Obstacles { .. } => refused(Kind::Refused, "remove these obstacles; nothing was changed"),
        MigrationError::FrozenTooLong { .. } => refused(
            Kind::Refused,
            "permit more time with --max-frozen, or migrate it when it does less; the same command continues",
        ),
        MigrationError::MemoryChangesTooFast { .. } => refused(
            Kind::Refused,
            "slow it with --throttle, permit more time with --max-frozen, or migrate it when it does less; the machine runs here",
        ),
        MigrationError::Unresolved { .. } => refused(
            Kind::Io,
            "look at both hosts with 'virsh list --all': it must run at one of them only; both have its disks as they were \
             when it was stopped",
        ),
        MigrationError::NotPulled { .. } => refused(
            Kind::Io,
            "keep the disks here as they are; the same command continues, and the machine there waits when it needs what is missing",
        ),
        MigrationError::SourceChanged { .. } => refused(
            Kind::Refused,
            "what changed here may be damaged there: stop the machine on both hosts, and restore a backup, or use one of the disks",
        ),
        MigrationError::ElsewherePulled { .. } => refused(
            Kind::Refused,
            "name that address; if the machine there is not needed any more, delete the record",
        ),
        MigrationError::Interrupted { .. } => refused(Kind::Refused, "the same command as then completes it"),
        MigrationError::Paused { .. } => refused(
            Kind::Refused,
            "it stays here: resume it, and migrate it again; the same command continues the copies of its disks",
        ),
        MigrationError::Ended { .. } => refused(Kind::Refused, "start it, and migrate it again"),
        _ => refused(
            Kind::Io,
            "the machine runs here, and the same command continues the copies of its disks",
        ),
    }
}
