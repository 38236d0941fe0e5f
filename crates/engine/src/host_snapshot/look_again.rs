//! The state at the instant, as far as it can be found out afterwards.
//!
//! Machines are looked at before an instant, which takes its time, and one may be started, stopped or resumed, or its disks moved, before
//! the providers cut. So they are looked at again when all run on, which pauses none of them: what has changed may have
//! changed before the cut, and the snapshot claims no more than holds in either case.

use holdfast_host::{DiskKind, DiskSource, MachineDisk, MachineState};

use super::guest_report::GuestReport;
use super::guests::{FrozenGuests, Session};
use super::subject::{CutMode, DiskCoverage, Subject};
use super::{HostSnapshotRequest, NamedSnapshotSet};
use crate::job::Job;
use crate::machine::quiesce::Quiesced;

impl Session<'_> {
    /// Looks at the machine once more, and takes back what its snapshot cannot claim.
    pub(super) fn look_again(&mut self, mode: CutMode, coverage: DiskCoverage, job: Job<'_>) {
        if self.has_failed() {
            return;
        }
        let now = match self.guest.machine.describe() {
            Ok(now) => now,
            Err(error) => {
                // One that has ended is not there any more, which is no news of one that was running or shut off.
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
            (MachineState::ShutOff, _) => Some("it was started while its disks were cut, and nothing held it"),
            (_, MachineState::Running) => Some("it was let run on while its disks were cut, and nothing held it"),
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

    /// What is in the snapshot of it is as after a power cut, at best.
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

/// What has become of disks between two looks, where it is not the same: a disk is elsewhere, is gone, or is new.
fn moved(then: &[MachineDisk], now: &[MachineDisk]) -> Option<String> {
    let of = |disks: &[MachineDisk], target: &str| {
        // A CD that is changed is no news.
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
    /// With the machines that run in what was cut by now, and were not known: they were not frozen.
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
            let reason = "it came while they were cut, and nothing held it";
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
