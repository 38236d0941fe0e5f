//! A running machine held by a VirtualBox snapshot: the images that it used until then are no longer written.
//!
//! The snapshot is named `holdfast-backup-PLACE-RUN`, after the folder of its backup's lock and the number of its run.
//! It is deleted when the holder is dropped, even after errors. Only a killed program leaves it behind; then the next
//! backup with the same lock folder finds it by its name. VirtualBox merges what the machine has written since, while
//! it runs.

use holdfast_hardware::virtualbox::Snapshot;
use holdfast_host::MachineState;
use holdfast_host::virtualbox::{SnapshotMode, VBoxManage};

use super::machine::VirtualBoxMachine;
use crate::job::{Progress, Result};

/// The prefix of the snapshots' names.
const PREFIX: &str = "holdfast-backup-";
/// Its description, for users who find it.
const DESCRIPTION: &str = "made by holdfast backup, which deletes it when it has read the machine; if it is still there, the next backup does";

/// A machine held by a snapshot.
pub(crate) struct HoldingSnapshot<'a> {
    manager: &'a VBoxManage,
    machine: &'a VirtualBoxMachine<'a>,
    progress: &'a dyn Progress,
    snapshot: Option<String>,
}

impl<'a> HoldingSnapshot<'a> {
    /// Takes a snapshot of a machine that runs or is paused.
    pub(super) fn take(
        manager: &'a VBoxManage,
        machine: &'a VirtualBoxMachine<'a>,
        place: &str,
        run: u32,
        state: MachineState,
        progress: &'a dyn Progress,
    ) -> Result<Self> {
        let name = format!("{PREFIX}{place}-{run:08x}");
        let meanwhile = match state {
            MachineState::Running => SnapshotMode::Live,
            _ => SnapshotMode::Paused,
        };
        let taken = manager.take_snapshot(machine.uuid(), &name, DESCRIPTION, meanwhile);
        // The snapshot may exist although VBoxManage reports a failure, or does not report its UUID.
        let found = || {
            let snapshots = machine.read().map(|said| said.settings.snapshots);
            let found = snapshots.into_iter().flatten().find(|snapshot| snapshot.name == name);
            found.map(|snapshot| snapshot.uuid)
        };
        let (snapshot, error) = match taken {
            Ok(uuid) => (Some(uuid), None),
            Err(error) => (found(), Some(error)),
        };
        let frozen = Self {
            manager,
            machine,
            progress,
            snapshot,
        };
        match error {
            // Some versions of VBoxManage do not report the UUID; the snapshot is valid all the same.
            Some(holdfast_host::Error::Configuration { .. }) if frozen.snapshot.is_some() => Ok(frozen),
            Some(error) => Err(error.into()),
            None => Ok(frozen),
        }
    }

    /// The UUID of the snapshot.
    pub(super) fn snapshot(&self) -> &str {
        self.snapshot.as_deref().unwrap_or_default()
    }

    /// Deletes the snapshot; if that fails, returns why.
    pub(super) fn end(mut self) -> Option<String> {
        self.delete()
    }

    fn delete(&mut self) -> Option<String> {
        let snapshot = self.snapshot.take()?;
        delete(self.manager, self.machine, &snapshot, self.progress)
    }
}

impl Drop for HoldingSnapshot<'_> {
    fn drop(&mut self) {
        self.delete();
    }
}

/// A VirtualBox snapshot that a backup has created.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LeftSnapshot {
    pub(crate) uuid: String,
    pub(crate) name: String,
}

impl VirtualBoxMachine<'_> {
    /// The snapshots that backups have created, the oldest first: of a running backup, or left by a killed one.
    pub(crate) fn left_snapshots(&self) -> Result<Vec<LeftSnapshot>> {
        let snapshots = self.read()?.settings.snapshots.into_iter();
        let own = snapshots.filter(|snapshot| is_holdfast_snapshot(&snapshot.name));
        let left = |Snapshot { uuid, name, .. }| LeftSnapshot { uuid, name };
        Ok(own.map(left).collect())
    }

    /// Deletes the snapshots that killed backups have left, and returns their names. Without `VBoxManage` none is
    /// deleted.
    ///
    /// The caller must make sure that no backup of the machine is running.
    pub(crate) fn delete_left(&self, progress: &dyn Progress) -> Result<Vec<String>> {
        let snapshots = self.read()?.settings.snapshots;
        Ok(self.manager().map_or_else(Vec::new, |manager| {
            delete_left(manager, self, &snapshots, None, progress)
        }))
    }

    /// The program that takes and deletes snapshots.
    pub(crate) fn manager(&self) -> Option<&VBoxManage> {
        self.place().manager()
    }
}

/// Deletes the snapshots that killed backups have left, from one place or from all; returns the deleted ones.
///
/// The caller must make sure that no other backup of the machine from that place is running.
pub(super) fn delete_left(
    manager: &VBoxManage,
    machine: &VirtualBoxMachine<'_>,
    snapshots: &[Snapshot],
    place: Option<&str>,
    progress: &dyn Progress,
) -> Vec<String> {
    // From the newest on: each is merged into the one before it.
    let is_meant = |snapshot: &&Snapshot| {
        is_holdfast_snapshot(&snapshot.name) && place.is_none_or(|place| is_from(&snapshot.name, place))
    };
    let left = snapshots.iter().rev().filter(is_meant);
    let mut deleted = Vec::new();
    for snapshot in left {
        if delete(manager, machine, &snapshot.uuid, progress).is_none() {
            progress.note(&format!(
                "{}: the snapshot {} of VirtualBox, which a backup had left that was killed, is deleted",
                machine.name(),
                snapshot.name
            ));
            deleted.push(snapshot.name.clone());
        }
    }
    deleted
}

/// Whether a backup has created the snapshot of that name.
pub(super) fn is_holdfast_snapshot(name: &str) -> bool {
    let is_number = |digits: &str| digits.len() == 8 && digits.bytes().all(|byte| byte.is_ascii_hexdigit());
    let numbers = name.strip_prefix(PREFIX);
    numbers.is_some_and(|numbers| numbers.split('-').count() <= 2 && numbers.split('-').all(is_number))
}

/// Whether a backup from `place` may have created it: names of old versions contain no place.
fn is_from(name: &str, place: &str) -> bool {
    let numbers = name.strip_prefix(PREFIX).unwrap_or_default();
    numbers.split_once('-').is_none_or(|(there, _)| there == place)
}

/// Deletes a snapshot. If it still exists, warns and returns why.
fn delete(
    manager: &VBoxManage,
    machine: &VirtualBoxMachine<'_>,
    snapshot: &str,
    progress: &dyn Progress,
) -> Option<String> {
    let deleted = manager.delete_snapshot(machine.uuid(), snapshot);
    // The result is not trusted: it may be lost although the snapshot is deleted, or report success although it is not.
    let is_there = machine.read().map_or(true, |said| {
        said.settings.snapshots.iter().any(|there| there.uuid == snapshot)
    });
    if !is_there {
        return None;
    }
    let error = match deleted {
        Ok(()) => "VBoxManage says that it is deleted, and the settings of the machine still have it".to_owned(),
        Err(error) => error.to_string(),
    };
    progress.warning(&format!(
        "{} keeps the snapshot {snapshot} of VirtualBox, and grows by what it writes until that is gone: {error}; the next backup tries again, or: \
         {} snapshot {} delete {snapshot}",
        machine.name(),
        manager.program(),
        machine.uuid()
    ));
    Some(error)
}

#[cfg(test)]
mod tests {
    use super::{is_from, is_holdfast_snapshot};

    #[test]
    fn other_names_are_not_of_holdfast() {
        assert!(
            is_holdfast_snapshot("holdfast-backup-0000002a")
                && is_holdfast_snapshot("holdfast-backup-0123abcd-0000002a")
        );
        for other in [
            "",
            "mine",
            "holdfast-backup-",
            "holdfast-backup-2a",
            "holdfast-backup-0000002g",
            "holdfast-backup-0000002a1",
            "holdfast-backup-0123abcd-",
            "holdfast-backup-0123abcd-0000002a-0000002a",
            "a holdfast-backup-0000002a",
            "holdfast-backup-before-the-upgrade",
        ] {
            assert!(!is_holdfast_snapshot(other), "{other}");
        }
    }

    /// Backups from there may be running.
    #[test]
    fn snapshots_of_other_places_are_left() {
        let name = "holdfast-backup-0123abcd-0000002a";
        assert!(is_from(name, "0123abcd") && !is_from(name, "0123abce") && !is_from(name, "0000002a"));
        assert!(is_from("holdfast-backup-0000002a", "0123abcd"));
    }
}
