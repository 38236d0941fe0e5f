//! The report of `holdfast backup` about machines.

mod container;

use std::time::Duration;

use holdfast_engine::{
    BackupReport, Bottleneck, Compared, Load, MachineBackupReport, MachineReading, Method, NOTE_CONSISTENCY, Quiesced,
    VirtualBoxMethod, VirtualBoxReading, XenChange, XenDiskReport, XenReading,
};
use serde::Serialize;

use super::limits::LoadDocument;
use crate::exit::Exit;
use crate::output::snapshot::{SnapshotDocument, changed_bytes};
use crate::output::{Page, Report, Style};
use crate::units::{self, micros};

/// Report of `backup` about machines.
#[derive(Debug, Serialize)]
pub(super) struct MachinesDone {
    pub(super) machines: Vec<MachineDone>,
    pub(super) failed: Vec<Failed>,
    pub(super) left_out_machines: Vec<LeftOut>,
}

/// A machine that was backed up.
#[derive(Debug, Serialize)]
pub(super) struct MachineDone {
    snapshot: SnapshotDocument,
    /// "filter", "reflink", "overlay", "pause", "images" or "virtualbox-snapshot"; for a pool of XenServer "nbd", "vhd" or "raw"; "container-snapshot".
    method: &'static str,
    /// The reason for the method, in words.
    method_reason: String,
    /// How long the machine was paused: zero if it was not paused; null if it was not running.
    paused_us: Option<u64>,
    /// The part of the pause that taking the disks' point in time took, including the last pass of memory.
    cut_us: Option<u64>,
    /// "memory", "file system", "crash", or "shut off".
    consistency: String,
    /// Bytes of its memory in the snapshot; null if the snapshot has no memory.
    memory_bytes: Option<u64>,
    /// How long its file systems were frozen; null if they were not.
    frozen_us: Option<u64>,
    /// The part of that time that the guest needed to freeze them.
    freeze_us: Option<u64>,
    read_bytes: u64,
    changed_bytes: u64,
    stored_bytes: u64,
    duration_ms: u64,
    /// "source", "cpu" or "target".
    bottleneck: Option<&'static str>,
    disks: Vec<DiskDone>,
    left_out: Vec<LeftOut>,
    load: LoadDocument,
    #[serde(skip)]
    limit: Option<String>,
    #[serde(skip)]
    how: How,
    #[serde(skip)]
    taken_in: Option<Duration>,
    #[serde(skip)]
    has_remains: bool,
}

/// How a machine was read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum How {
    Qemu(Method),
    VirtualBox,
    Pool,
    Container,
}

/// How a machine was read: the method, its name, and the reason.
struct ReadingWay {
    how: How,
    word: &'static str,
    reason: String,
}

/// How a disk was compared with the previous snapshot.
#[derive(Debug, Serialize)]
struct DiskDone {
    name: String,
    /// Whether only the ranges in a bitmap were read.
    is_incremental: bool,
    dirty_bytes: Option<u64>,
    /// Why the whole disk was read.
    reason: Option<String>,
}

impl DiskDone {
    /// A disk of which only possibly changed ranges were read.
    fn incremental(name: String, dirty_bytes: u64) -> Self {
        Self {
            name,
            is_incremental: true,
            dirty_bytes: Some(dirty_bytes),
            reason: None,
        }
    }

    /// A disk that was read completely, and the reason.
    fn whole(name: String, reason: String) -> Self {
        Self {
            name,
            is_incremental: false,
            dirty_bytes: None,
            reason: Some(reason),
        }
    }

    /// The kind of comparison, in words.
    fn how(&self, method: How) -> String {
        let dirty = units::bytes(self.dirty_bytes.unwrap_or_default());
        match (&self.reason, method) {
            (Some(reason), _) => format!("read everything: {reason}"),
            (None, How::Qemu(Method::Snapshot)) => {
                format!("read what lies elsewhere than in the host snapshot before, {dirty}")
            }
            (None, How::Container) => format!("read what the layers since the backup before contain, {dirty}"),
            (None, How::Pool) => format!("read what the pool says has changed, {dirty}"),
            (None, _) => format!("read what the bitmap names, {dirty}"),
        }
    }
}

/// A disk or a machine that was excluded.
#[derive(Debug, Serialize)]
pub(super) struct LeftOut {
    pub(super) name: String,
    pub(super) reason: String,
}

impl LeftOut {
    pub(super) fn new(name: String, reason: impl Into<String>) -> Self {
        Self {
            name,
            reason: reason.into(),
        }
    }
}

/// A machine that was not backed up.
#[derive(Debug, Serialize)]
pub(super) struct Failed {
    pub(super) machine: String,
    pub(super) error: String,
}

impl MachineDone {
    fn of(backup: &BackupReport, way: ReadingWay, load: &Load, left_out: Vec<(String, String)>) -> Self {
        let statistics = backup.snapshot.statistics();
        let load = LoadDocument::new(load, backup.duration);
        let bottleneck = backup.bottleneck.map(|bottleneck| bottleneck.to_string());
        let consistency = backup.snapshot.notes.get(NOTE_CONSISTENCY);
        let left_out = left_out.into_iter().map(|(name, reason)| LeftOut::new(name, reason));
        Self {
            snapshot: SnapshotDocument::from(&backup.snapshot),
            method: way.word,
            method_reason: way.reason,
            how: way.how,
            consistency: consistency.cloned().unwrap_or_default(),
            memory_bytes: None,
            taken_in: None,
            has_remains: false,
            paused_us: None,
            cut_us: None,
            frozen_us: None,
            freeze_us: None,
            read_bytes: statistics.read_bytes,
            changed_bytes: changed_bytes(&statistics),
            stored_bytes: backup.stored_bytes,
            duration_ms: units::millis(backup.duration),
            bottleneck: backup.bottleneck.map(Bottleneck::word),
            limit: load.limit().map(str::to_owned).or(bottleneck),
            load,
            disks: Vec::new(),
            left_out: left_out.collect(),
        }
    }
}

impl From<MachineBackupReport<MachineReading>> for MachineDone {
    fn from(MachineBackupReport { backup, reading }: MachineBackupReport<MachineReading>) -> Self {
        let disk = |(name, compared): (String, Compared)| match compared {
            Compared::ByBitmap { dirty_bytes } | Compared::ByHostSnapshots { dirty_bytes } => {
                DiskDone::incremental(name, dirty_bytes)
            }
            Compared::ByContent(why) => DiskDone::whole(name, why.to_string()),
        };
        let InstantShown {
            paused_us,
            cut_us,
            frozen_us,
            freeze_us,
            ..
        } = InstantShown::new(&reading);
        let way = ReadingWay {
            how: How::Qemu(reading.method),
            word: reading.method.word(),
            reason: reading.method_reason,
        };
        Self {
            memory_bytes: reading.memory_bytes,
            paused_us,
            cut_us,
            frozen_us,
            freeze_us,
            disks: reading.compared.into_iter().map(disk).collect(),
            ..Self::of(&backup, way, &reading.load, reading.left_out)
        }
    }
}

impl From<MachineBackupReport<VirtualBoxReading>> for MachineDone {
    fn from(MachineBackupReport { backup, reading }: MachineBackupReport<VirtualBoxReading>) -> Self {
        let disk = |name| DiskDone::whole(name, "VirtualBox keeps no record of what a machine writes".to_owned());
        let way = ReadingWay {
            how: How::VirtualBox,
            word: reading.way.word(),
            reason: reading.reason,
        };
        Self {
            memory_bytes: reading.memory_bytes,
            taken_in: match reading.way {
                VirtualBoxMethod::Images => None,
                VirtualBoxMethod::Snapshot { taken_in } => Some(taken_in),
            },
            has_remains: reading.remains.is_some(),
            disks: reading.disks.into_iter().map(disk).collect(),
            ..Self::of(&backup, way, &waited(reading.waited), reading.left_out)
        }
    }
}

impl From<MachineBackupReport<XenReading>> for MachineDone {
    fn from(MachineBackupReport { backup, reading }: MachineBackupReport<XenReading>) -> Self {
        let disk = |disk: XenDiskReport| match disk.change {
            XenChange::Since { changed_bytes } => DiskDone::incremental(disk.name, changed_bytes),
            XenChange::Everything(reason) => DiskDone::whole(disk.name, reason),
        };
        let word = reading.disks.first().map_or("none", |disk| disk.way.name());
        let way = ReadingWay {
            how: How::Pool,
            word,
            reason: format!("its disks come from a snapshot of the pool, read by {word}"),
        };
        Self {
            memory_bytes: reading.memory_bytes,
            has_remains: reading.has_remains,
            taken_in: Some(reading.snapshot_duration),
            disks: reading.disks.into_iter().map(disk).collect(),
            ..Self::of(&backup, way, &waited(reading.waited), reading.left_out)
        }
    }
}

/// A load in which reading only had to wait for the rate limit.
fn waited(waited: Duration) -> Load {
    Load {
        waited,
        ..Load::default()
    }
}

impl MachineDone {
    fn human(&self, page: &mut Page) {
        let duration = Duration::from_millis(self.duration_ms);
        let mut parts = vec![
            format!("{} read", units::bytes(self.read_bytes)),
            format!("{} changed", units::bytes(self.changed_bytes)),
            format!("{} stored", units::bytes(self.stored_bytes)),
            units::duration(duration),
        ];
        parts.extend(units::rate(self.read_bytes, duration).map(units::bytes_per_second));
        parts.extend(self.limit.as_ref().map(|what| format!("limited by {what}")));
        page.line(&format!(
            "{}  snapshot {}  {}",
            self.snapshot.machine,
            &self.snapshot.id[..8],
            parts.join(", ")
        ));
        match self.how {
            How::Qemu(method) => self.human_of_qemu(method, page),
            How::VirtualBox => self.human_of_virtualbox(page),
            How::Pool => self.human_of_pool(page),
            How::Container => self.human_of_container(page),
        }
        for line in self.load.lines() {
            page.line(&line);
        }
        for disk in &self.disks {
            page.line(&format!("  {}: {}", disk.name, disk.how(self.how)));
        }
        for disk in &self.left_out {
            page.line(&format!("  {}: left out: {}", disk.name, disk.reason));
        }
    }

    fn human_of_pool(&self, page: &mut Page) {
        page.line(&format!(
            "  one instant, by a snapshot of the pool, taken in {} and {} ({})",
            units::duration(self.taken_in.unwrap_or_default()),
            if self.has_remains {
                "still there"
            } else {
                "removed again"
            },
            self.method_reason
        ));
        match (self.memory_bytes, &self.consistency[..]) {
            (Some(bytes), _) => page.line(&format!("  with its memory of {}", units::bytes(bytes))),
            (None, "shut off") => {}
            (None, _) => page.line("  crash-consistent: its file systems were not frozen"),
        }
    }

    fn human_of_qemu(&self, how: Method, page: &mut Page) {
        let instant = InstantShown {
            method: how,
            reason: &self.method_reason,
            paused_us: self.paused_us,
            cut_us: self.cut_us,
            memory_bytes: self.memory_bytes,
            frozen_us: self.frozen_us,
            freeze_us: self.freeze_us,
        };
        instant.lines().iter().for_each(|line| page.line(line));
    }

    fn human_of_virtualbox(&self, page: &mut Page) {
        let instant = match self.taken_in {
            None => format!("  read from its images ({})", self.method_reason),
            Some(time) => format!(
                "  one instant, by a snapshot of VirtualBox, taken in {} and {} ({})",
                units::duration(time),
                if self.has_remains {
                    "still there"
                } else {
                    "deleted again"
                },
                self.method_reason
            ),
        };
        page.line(&instant);
        match self.memory_bytes {
            Some(bytes) => page.line(&format!(
                "  with its memory of {}, as VirtualBox saved it",
                units::bytes(bytes)
            )),
            None if self.taken_in.is_some() => {
                page.line("  crash-consistent: VirtualBox does not freeze file systems");
            }
            None => {}
        }
    }
}

/// The report about the point in time of a machine.
pub(crate) struct InstantShown<'a> {
    method: Method,
    reason: &'a str,
    pub(crate) paused_us: Option<u64>,
    cut_us: Option<u64>,
    memory_bytes: Option<u64>,
    pub(crate) frozen_us: Option<u64>,
    freeze_us: Option<u64>,
}

impl<'a> InstantShown<'a> {
    pub(crate) fn new(reading: &'a MachineReading) -> Self {
        let (frozen, freeze) = match &reading.quiesced {
            Quiesced::Yes { frozen, freeze, .. } => (Some(*frozen), Some(*freeze)),
            _ => (None, None),
        };
        Self {
            method: reading.method,
            reason: &reading.method_reason,
            paused_us: reading.pause.map(|pause| micros(pause.total)),
            cut_us: reading.pause.map(|pause| micros(pause.cut)),
            memory_bytes: reading.memory_bytes,
            frozen_us: frozen.map(micros),
            freeze_us: freeze.map(micros),
        }
    }

    pub(crate) fn lines(&self) -> Vec<String> {
        let time = |us| units::duration(Duration::from_micros(us));
        let by = match self.method {
            Method::Images => "read from its images",
            Method::Filter => "one instant, by a filter in QEMU",
            Method::Reflink => "one instant, by clones of its images",
            Method::Overlay => "one instant, by overlays that are brought down again",
            Method::Snapshot => "one instant, from host snapshots",
            Method::Pause => "one instant, from its images while it was paused",
        };
        let stood_still = match (self.method, self.paused_us) {
            (Method::Images, _) => String::new(),
            (_, None) => "; it is paused".to_owned(),
            (_, Some(0)) => "; not paused".to_owned(),
            (_, Some(us)) => format!(
                "; paused {}, {} of it for the snapshot point",
                time(us),
                time(self.cut_us.unwrap_or_default())
            ),
        };
        let mut lines = vec![format!("  {by} ({}){stood_still}", self.reason)];
        if self.method != Method::Images {
            lines.push(match (self.memory_bytes, self.frozen_us) {
                (Some(bytes), _) => format!(
                    "  with its memory ({}): a restored machine can resume where it was",
                    units::bytes(bytes)
                ),
                (None, Some(us)) => format!(
                    "  consistent for its file systems, which were frozen for {}, {} of it until they were",
                    time(us),
                    time(self.freeze_us.unwrap_or_default())
                ),
                (None, None) => "  crash-consistent: its file systems were not frozen".to_owned(),
            });
        }
        lines
    }
}

impl Report for MachinesDone {
    fn command(&self) -> &'static str {
        "backup"
    }

    fn is_confirmation(&self) -> bool {
        true
    }

    fn exit(&self) -> Exit {
        if self.failed.is_empty() { Exit::Ok } else { Exit::Error }
    }

    fn human(&self, page: &mut Page) {
        for machine in &self.machines {
            machine.human(page);
        }
        for machine in &self.left_out_machines {
            page.line(&format!("{}: left out: {}", machine.name, machine.reason));
        }
        if !self.failed.is_empty() {
            let names: Vec<&str> = self.failed.iter().map(|failed| &failed.machine[..]).collect();
            page.styled(Style::Bad, &format!("not backed up: {}", names.join(", ")));
        }
    }
}
