//! Verifies the state at the point in time afterwards, as far as possible.
//!
//! Machines are examined before the point in time, and a machine may be started, stopped or resumed, or its disks
//! moved, before the providers make the snapshots. So they are examined again when all are running again, which pauses
//! no machine. A change may have happened before the snapshot, and the snapshot then claims only what holds in either
//! case.

use holdfast_host::{DiskKind, DiskSource, MachineDisk, MachineState};

use super::guest_report::GuestReport;
use super::guests::{FrozenGuests, Session};
use super::subject::{CutMode, DiskCoverage, Subject};
use super::{HostSnapshotRequest, NamedSnapshotSet};
use crate::job::Job;
use crate::machine::quiesce::Quiesced;

impl Session<'_> {
    /// Examines the machine again, and lowers the consistency of its snapshot if it changed.
    pub(super) fn look_again(&mut self, mode: CutMode, coverage: DiskCoverage, job: Job<'_>) {
        if self.has_failed() {
            return;
        }
        let now = match self.guest.machine.describe() {
            Ok(now) => now,
            Err(error) => {
                // A transient machine that has ended no longer exists, which is expected if it was running or shut off.
                let is_gone = matches!(error, holdfast_host::Error::NoSuchMachine { .. });
                if !is_gone && self.report.state != MachineState::Running {
                    self.doubt(&format!("it could not be looked at once more: {error}"), job);
                }
                return;
            }
        };
        let state = now.summary.state;
        let changed = match (self.report.state, state) {
            (MachineState::ShutOff, MachineState::ShutOff) | (MachineState::Running, _) => None,
            (MachineState::ShutOff, _) => {
                Some("it was started while its disks were cut, and was neither paused nor frozen")
            }
            (_, MachineState::Running) => {
                Some("it was resumed while its disks were cut, and was neither paused nor frozen")
            }
            _ => None,
        };
        if let Some(changed) = changed {
            self.report.state = state;
            match mode {
                CutMode::AtOnce => self.doubt(changed, job),
                CutMode::InTurn => {
                    self.fail(changed);
                    return;
                }
            }
        }
        if let Some(moved) = moved(&self.guest.description.disks, &now.disks) {
            match coverage {
                DiskCoverage::AllDisks => self.fail(&moved),
                DiskCoverage::SomeDisks => self.doubt(&moved, job),
            }
        }
    }

    /// Lowers the consistency to that after a power cut, at best.
    fn doubt(&mut self, reason: &str, job: Job<'_>) {
        let machine = &self.report.name;
        job.progress
            .warning(&format!("{machine}: {reason}; the snapshot is as after a power cut"));
        self.report.quiesced = Quiesced::Failed(reason.to_owned());
        if self.report.state == MachineState::ShutOff {
            self.report.state = MachineState::Between;
        }
    }
}

/// Describes how the disks changed between two examinations, if they did: a disk is elsewhere, missing or new.
fn moved(then: &[MachineDisk], now: &[MachineDisk]) -> Option<String> {
    let of = |disks: &[MachineDisk], target: &str| {
        // A changed CD does not count.
        let is_it = |disk: &&MachineDisk| {
            disk.target == target && !disk.is_read_only && matches!(disk.kind, DiskKind::Disk | DiskKind::Lun)
        };
        let disk = disks.iter().find(is_it);
        disk.map_or(DiskSource::Empty, |disk| disk.source.clone())
    };
    let targets = then.iter().chain(now).map(|disk| &disk.target);
    let mut moved = targets.filter(|target| of(then, target) != of(now, target));
    let target = moved.next()?;
    Some(match (of(then, target), of(now, target)) {
        (DiskSource::Empty, new) => format!("it was given the disk {target} meanwhile, which is {}", shown(&new)),
        (old, DiskSource::Empty) => format!(
            "the disk {target} was taken from it meanwhile, which was {}",
            shown(&old)
        ),
        (old, new) => format!(
            "its disk {target} was moved meanwhile, from {} to {}",
            shown(&old),
            shown(&new)
        ),
    })
}

fn shown(source: &DiskSource) -> String {
    match source {
        DiskSource::File(path) | DiskSource::Device(path) => path.display().to_string(),
        DiskSource::Other(place) => place.clone(),
        DiskSource::Empty => "nowhere".to_owned(),
    }
}

impl FrozenGuests {
    /// Adds machines that now run on the snapshotted datasets and were unknown before: they were not frozen.
    pub(super) fn with_newcomers(mut self, request: &HostSnapshotRequest<'_>, job: Job<'_>) -> Self {
        let Subject::Datasets(find) = request.subject else {
            return self;
        };
        let wanted = request
            .cuts
            .iter()
            .flat_map(|cut: &NamedSnapshotSet| cut.wanted.iter().cloned());
        for newcomer in find(&wanted.collect::<Vec<_>>()) {
            let summary = newcomer.summary;
            if self.guests.iter().any(|guest| guest.uuid == summary.uuid) {
                continue;
            }
            let reason = "it came while they were cut, and was neither paused nor frozen";
            let machine = &summary.name;
            job.progress
                .warning(&format!("{machine}: {reason}; the snapshot is as after a power cut"));
            self.guests.push(GuestReport {
                name: summary.name,
                uuid: summary.uuid,
                state: summary.state,
                quiesced: Quiesced::Failed(reason.to_owned()),
                paused: None,
                memory_bytes: None,
            });
        }
        self
    }
}

#[cfg(test)]
mod tests {
    use holdfast_host::{DiskKind, DiskSource, MachineDisk};

    use super::moved;

    fn disk(target: &str, path: &str) -> MachineDisk {
        MachineDisk {
            target: target.to_owned(),
            kind: DiskKind::Disk,
            source: DiskSource::File(path.into()),
            format: None,
            is_read_only: false,
            is_shared: false,
            alias: None,
        }
    }

    #[test]
    fn a_disk_that_was_moved_added_or_removed_is_reported() {
        let then = [disk("vda", "/a"), disk("vdb", "/b")];
        assert_eq!(moved(&then, &[disk("vdb", "/b"), disk("vda", "/a")]), None);
        let moved_to = |now: &[MachineDisk]| moved(&then, now).unwrap();
        assert!(moved_to(&[disk("vda", "/a"), disk("vdb", "/c")]).ends_with("from /b to /c"));
        assert!(moved_to(&[disk("vda", "/a")]).contains("vdb was taken"));
        let three = [disk("vda", "/a"), disk("vdb", "/b"), disk("vdc", "/c")];
        assert!(moved_to(&three).contains("given the disk vdc"));
        let mut cd = disk("sda", "/cd");
        cd.kind = DiskKind::Cdrom;
        assert_eq!(moved(&then, &[&then[..], &[cd]].concat()), None);
    }
}
