//! The part of the report about containers.

use std::time::Duration;

use holdfast_engine::{ContainerChange, ContainerReading, MachineBackupReport, SnapshotState};

use super::{DiskDone, How, MachineDone, ReadingWay, waited};
use crate::output::Page;
use crate::units::{self, micros};

impl From<MachineBackupReport<ContainerReading>> for MachineDone {
    fn from(MachineBackupReport { backup, reading }: MachineBackupReport<ContainerReading>) -> Self {
        let disk = match reading.change {
            ContainerChange::Since { changed_bytes } => DiskDone::incremental(reading.disk, changed_bytes),
            ContainerChange::Everything(reason) => DiskDone::whole(reading.disk, reason),
        };
        let is_mounted = reading.state != SnapshotState::Unmounted;
        let way = ReadingWay {
            how: How::Container,
            word: "container-snapshot",
            reason: if is_mounted {
                "it is mounted"
            } else {
                "it is not mounted"
            }
            .to_owned(),
        };
        let paused_us = micros(reading.paused);
        Self {
            paused_us: is_mounted.then_some(paused_us),
            cut_us: is_mounted.then_some(paused_us),
            frozen_us: (reading.state == SnapshotState::Frozen).then_some(paused_us),
            has_remains: reading.has_remains,
            disks: vec![disk],
            ..Self::of(&backup, way, &waited(reading.waited), Vec::new())
        }
    }
}

impl MachineDone {
    pub(super) fn human_of_container(&self, page: &mut Page) {
        page.line(&format!(
            "  one instant, by a snapshot of its layers, which stays for the next backup ({})",
            self.method_reason
        ));
        let time = |us| units::duration(Duration::from_micros(us));
        match (self.frozen_us, self.paused_us) {
            (Some(us), _) => page.line(&format!(
                "  consistent for its file system, which was frozen for {}",
                time(us)
            )),
            (None, Some(us)) => page.line(&format!(
                "  crash-consistent: its file system was not frozen; writes waited for {}",
                time(us)
            )),
            (None, None) => {}
        }
        if self.has_remains {
            page.line("  the snapshot of the backup before is not merged yet");
        }
    }
}
