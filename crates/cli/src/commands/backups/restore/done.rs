//! The report of `restore --to-machine`.

use holdfast_engine::{
    Definition, FileContent, MachineRestorePlan, MachineRestoreReport, PlannedFile, SpaceNeeded, Started,
};
use serde::Serialize;
use similar::TextDiff;

use super::RestoredDiskDocument;
use crate::output::{Page, Report, Style};
use crate::units;

/// Report of `restore --to-machine`.
#[derive(Debug, Serialize)]
pub(crate) struct MachineRestored {
    /// The snapshot; null if all data comes from host snapshots.
    id: Option<String>,
    machine: String,
    time: String,
    dry_run: bool,
    target_machine: TargetMachine,
    files: Vec<RestoredFileDocument>,
    rooms: Vec<RoomDocument>,
    /// A unified diff; none if the configuration is unchanged.
    configuration_diff: Option<String>,
    notes: Vec<String>,
    disks: Vec<RestoredDiskDocument>,
    /// The result of --live.
    live: Option<LiveDocument>,
    duration_ms: u64,
}

/// A machine that ran while its disks were filled.
#[derive(Debug, Serialize)]
pub(super) struct LiveDocument {
    pub(super) runs_after_ms: u64,
    pub(super) fill_ms: u64,
}

#[derive(Debug, Serialize)]
struct TargetMachine {
    name: String,
    uuid: String,
    is_new: bool,
    is_started: bool,
    /// Whether it resumed from its memory.
    is_resumed: bool,
    /// How far its clock is behind; null if the clock was set or needs no correction.
    clock_behind_ms: Option<u64>,
}

#[derive(Debug, Serialize)]
struct RestoredFileDocument {
    /// "disk", "firmware-variables" or "tpm-state".
    content: &'static str,
    /// The disk.
    name: Option<String>,
    from: Option<String>,
    target: String,
    format: String,
    /// "new", "overwrite", "in-place", "replace" or "set-aside".
    way: &'static str,
    /// The path to which the existing file was renamed.
    kept_at: Option<String>,
    size_bytes: u64,
    data_bytes: u64,
}

#[derive(Debug, Serialize)]
struct RoomDocument {
    folder: String,
    needed_bytes: u64,
    free_bytes: u64,
}

impl From<&PlannedFile> for RestoredFileDocument {
    fn from(file: &PlannedFile) -> Self {
        let (content, name) = match &file.content {
            FileContent::Disk(name) => ("disk", Some(name.clone())),
            FileContent::FirmwareVariables => ("firmware-variables", None),
            FileContent::TpmState(_) => ("tpm-state", None),
        };
        Self {
            content,
            name,
            from: file.from.as_ref().map(|path| path.display().to_string()),
            target: file.to.display().to_string(),
            format: file.format.to_string(),
            way: file.way.word(),
            kept_at: file.kept_at.as_ref().map(|path| path.display().to_string()),
            size_bytes: file.size_bytes,
            data_bytes: file.data_bytes,
        }
    }
}

impl From<&SpaceNeeded> for RoomDocument {
    fn from(room: &SpaceNeeded) -> Self {
        Self {
            folder: room.folder.display().to_string(),
            needed_bytes: room.needed_bytes,
            free_bytes: room.free_bytes,
        }
    }
}

impl MachineRestored {
    /// Adds the result of a machine that was started immediately.
    pub(super) fn with_live(self, live: LiveDocument) -> Self {
        Self {
            live: Some(live),
            ..self
        }
    }

    pub(crate) fn new(plan: &MachineRestorePlan, report: Option<&MachineRestoreReport>) -> Self {
        let disks = report.iter().flat_map(|report| &report.disks);
        let resumed = report.and_then(|report| match &report.started {
            Started::Resumed(resumed) => Some(*resumed),
            _ => None,
        });
        Self {
            id: Some(plan.snapshot.id.to_string()),
            machine: plan.snapshot.machine.clone(),
            time: holdfast_engine::time_of(&plan.snapshot).to_string(),
            dry_run: report.is_none(),
            target_machine: TargetMachine {
                name: plan.machine.name.clone(),
                uuid: plan.machine.uuid.clone(),
                is_new: plan.machine.is_new,
                is_started: report.is_some_and(|report| matches!(report.started, Started::Yes | Started::Resumed(_))),
                is_resumed: resumed.is_some(),
                clock_behind_ms: resumed.and_then(|resumed| resumed.clock_behind).map(units::millis),
            },
            files: plan.files.iter().map(RestoredFileDocument::from).collect(),
            rooms: plan.rooms.iter().map(RoomDocument::from).collect(),
            configuration_diff: plan.definition.as_ref().map(diff),
            notes: plan.notes.clone(),
            disks: disks.map(RestoredDiskDocument::from).collect(),
            live: None,
            duration_ms: report.map_or(0, |report| units::millis(report.duration)),
        }
    }

    /// The name of the restored machine in the snapshot.
    pub(crate) fn machine(&self) -> &str {
        &self.machine
    }

    /// Name and UUID of the target machine.
    pub(crate) fn target(&self) -> (&str, &str) {
        (&self.target_machine.name, &self.target_machine.uuid)
    }

    /// Removes the snapshot id, for restores from host snapshots.
    pub(crate) fn without_id(self) -> Self {
        Self { id: None, ..self }
    }

    fn human_live(&self, live: &LiveDocument, page: &mut Page) {
        let size_bytes = self.files.iter().map(|file| file.size_bytes).sum();
        let [after, fill] = [live.runs_after_ms, live.fill_ms].map(std::time::Duration::from_millis);
        let rate = units::rate(size_bytes, fill).map(units::bytes_per_second);
        let rate = rate.map(|rate| format!(", {rate}")).unwrap_or_default();
        page.line(&format!(
            "  it ran after {}; its disks were filled in {}{rate}",
            units::duration(after),
            units::duration(fill)
        ));
    }

    fn human_file(&self, file: &RestoredFileDocument, page: &mut Page) {
        let what = match (&file.name, file.content) {
            (Some(disk), _) => disk,
            (None, "tpm-state") => "state of its TPM",
            (None, _) => "firmware variables",
        };
        let way = match file.way {
            "overwrite" => "written over",
            "in-place" => "only what differs",
            "replace" => "replaced",
            "set-aside" => "new; the old file is kept",
            "shared" => "shares its blocks with the snapshot",
            "cloned" => "in a clone of its dataset",
            _ => "new",
        };
        let written = self.disks.iter().find(|disk| Some(&disk.name) == file.name.as_ref());
        let mut parts = vec![file.format.clone(), units::bytes(file.size_bytes)];
        match written {
            Some(disk) => {
                parts.push(format!("{} written", units::bytes(disk.written_bytes)));
                if disk.equal_bytes > 0 {
                    parts.push(format!("{} were there already", units::bytes(disk.equal_bytes)));
                }
            }
            None => parts.push(format!("{} of data", units::bytes(file.data_bytes))),
        }
        page.line(&format!("  {what}: {} ({way}): {}", file.target, parts.join(", ")));
    }
}

impl Report for MachineRestored {
    fn command(&self) -> &'static str {
        "restore"
    }

    fn is_confirmation(&self) -> bool {
        !self.dry_run
    }

    fn human(&self, page: &mut Page) {
        let machine = &self.target_machine;
        let becomes = match (self.dry_run, machine.is_new) {
            (true, true) => "would become the new machine",
            (true, false) => "would be restored in place to the machine",
            (false, true) => "is the new machine",
            (false, false) => "is restored in place to the machine",
        };
        let id = self.id.as_deref().unwrap_or_default();
        page.line(&format!(
            "{}  snapshot {}  {becomes} {} ({})",
            self.machine,
            id.get(..8).unwrap_or(id),
            machine.name,
            machine.uuid
        ));
        self.body(page);
    }
}

impl MachineRestored {
    /// What was or would be written.
    pub(crate) fn body(&self, page: &mut Page) {
        let machine = &self.target_machine;
        for file in &self.files {
            self.human_file(file, page);
        }
        for note in &self.notes {
            page.line(&format!("  {note}"));
        }
        if !self.dry_run {
            let duration = units::duration(std::time::Duration::from_millis(self.duration_ms));
            let runs = match (machine.is_resumed, machine.is_started) {
                (true, _) => "; resumed from memory",
                (_, true) => "; it runs",
                _ => "",
            };
            page.line(&format!("restored in {duration}{runs}"));
            if let Some(live) = &self.live {
                self.human_live(live, page);
            }
            if let Some(behind) = machine.clock_behind_ms {
                let behind = units::duration(std::time::Duration::from_millis(behind));
                page.line(&format!(
                    "  its clock is {behind} behind: no agent of its guest has set it"
                ));
            }
            return;
        }
        for room in &self.rooms {
            page.line(&format!(
                "  {}: {} needed, {} free",
                room.folder,
                units::bytes(room.needed_bytes),
                units::bytes(room.free_bytes)
            ));
        }
        for line in self.configuration_diff.iter().flat_map(|diff| diff.lines()) {
            page.styled(
                match line.as_bytes().first() {
                    Some(b'+') => Style::Good,
                    Some(b'-') => Style::Warning,
                    _ => Style::Faint,
                },
                line,
            );
        }
        page.line("nothing was changed");
    }
}

/// The changes of the configuration, with a few lines of context.
fn diff(definition: &Definition) -> String {
    let (before, after) = (
        without_passwords(&definition.before),
        without_passwords(&definition.text),
    );
    TextDiff::from_lines(&before, &after)
        .unified_diff()
        .header("before", "after")
        .to_string()
}

/// Removes passwords of remote displays, which must not be printed.
fn without_passwords(text: &str) -> String {
    let (mut result, mut rest) = (String::new(), text);
    while let Some(at) = rest.find("passwd=") {
        let value = at + "passwd=".len();
        result.push_str(&rest[..value]);
        rest = &rest[value..];
        let Some(quote) = rest.chars().next().filter(|quote| matches!(quote, '\'' | '"')) else {
            continue;
        };
        let end = rest[1..].find(quote).map_or(rest.len(), |end| end + 2);
        result.extend([quote, '*', '*', '*', quote]);
        rest = &rest[end..];
    }
    result + rest
}

#[cfg(test)]
mod tests {
    use super::without_passwords;

    #[test]
    fn passwords_are_not_shown() {
        assert_eq!(
            without_passwords("<a passwd='s\"x'/><b passwd=\"y\" c='1'/><passwd=/>"),
            "<a passwd='***'/><b passwd=\"***\" c='1'/><passwd=/>"
        );
        assert_eq!(without_passwords("<a passwd='x"), "<a passwd='***'");
    }
}
