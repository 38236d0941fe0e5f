//! `holdfast restore --to-machine`: a snapshot becomes a machine of a hypervisor.

use std::num::NonZeroU64;
use std::path::PathBuf;

use holdfast_engine::{
    AfterRestore, ConfigurationChoice, Content, Definition, FillRate, InPlaceWish, MachineName, MachineRestorePlan,
    MachineRestoreReport, MachineRestoreRequest, NewMachineIdentity, NewMachineWish, Overwrite, PlannedFile, Presence,
    RestoreAs, Room, Started, plan_machine_restore, restore_machine,
};
use serde::Serialize;
use similar::TextDiff;

use super::{DiskDone, RestoreArgs};
use crate::context::Context;
use crate::errors::Error;
use crate::exit::Exit;
use crate::files::runs;
use crate::machines::states::StateArgs;
use crate::machines::{connect_libvirt, libvirt_address};
use crate::output::units;
use crate::output::{Page, Report, Style};

/// Options of `restore` that are about machines.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Options for machines")]
#[expect(clippy::struct_excessive_bools, reason = "each is an option of its own")]
pub(super) struct MachineArgs {
    /// Restore to a machine: a new one, or with --in-place the one that is there
    #[arg(long)]
    pub(super) to_machine: bool,
    /// The hypervisor's address: qemu:///system, qemu:///session
    #[arg(short, long, value_name = "URI")]
    connect: Option<String>,
    /// What the new machine is called, or which machine is restored in place; NAME-restored, or the snapshot's, where not given
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// Keep name, UUID and network addresses of the machine, which must not be there any more
    #[arg(long, conflicts_with = "in_place")]
    keep_identity: bool,
    /// What accelerates the new machine: kvm, or qemu where the host has no KVM; what did, where not given
    #[arg(long, value_name = "TYPE", value_parser = ["kvm", "qemu"], conflicts_with_all = ["in_place", "resume"])]
    domain_type: Option<String>,
    /// The folder for the new images, where they are not to be beside the originals
    #[arg(long, value_name = "FOLDER", conflicts_with = "in_place")]
    storage: Option<PathBuf>,
    /// A new file for one of the disks, or with --force a file or block device that is there; may be given several times
    #[arg(long = "disk", value_name = "DISK=PATH", value_parser = parse_place, conflicts_with = "in_place")]
    places: Vec<(String, PathBuf)>,
    /// In place, restore the machine's configuration too; it is kept otherwise
    #[arg(long, requires = "in_place")]
    configuration: bool,
    /// Start the machine when it is restored
    #[arg(long)]
    start: bool,
    /// Let the machine go on from the memory in the snapshot, where it was at that instant
    #[arg(long, conflicts_with = "start")]
    resume: bool,
    /// Start the machine at once, from the snapshot, and fill its images while it runs
    #[arg(long, conflicts_with_all = ["in_place", "start", "resume"])]
    live: bool,
    /// Bytes with which --live fills the images each second, at most: 50M. 64M where not given, twice as much after each minute
    #[arg(long, value_name = "SIZE", value_parser = crate::args::parse_rate, requires = "live")]
    bwlimit: Option<NonZeroU64>,
    /// Show what would be written and defined; change nothing
    #[arg(short = 'n', long)]
    dry_run: bool,
}

impl MachineArgs {
    /// An option that was given, though it says nothing without `--to-machine`.
    pub(super) fn out_of_place(&self) -> Option<&'static str> {
        let given = [
            ("--connect", self.connect.is_some()),
            ("--name", self.name.is_some()),
            ("--keep-identity", self.keep_identity),
            ("--domain-type", self.domain_type.is_some()),
            ("--storage", self.storage.is_some()),
            ("--disk", !self.places.is_empty()),
            ("--configuration", self.configuration),
            ("--start", self.start),
            ("--resume", self.resume),
            ("--live", self.live),
            ("--bwlimit", self.bwlimit.is_some()),
            ("--dry-run", self.dry_run),
        ];
        let found = given.into_iter().find(|(_, is_given)| *is_given && !self.to_machine);
        found.map(|(option, _)| option)
    }
}

/// `vda=/dev/vg/web1`
fn parse_place(text: &str) -> Result<(String, PathBuf), String> {
    match text.split_once('=') {
        Some((disk, path)) if !disk.is_empty() && !path.is_empty() => Ok((disk.to_owned(), path.into())),
        _ => Err("give a disk and its place: vda=/images/web1.qcow2".to_owned()),
    }
}

/// What `restore --to-machine` answers.
#[derive(Debug, Serialize)]
pub(crate) struct Done {
    /// The snapshot; null where all of it comes from host snapshots.
    id: Option<String>,
    machine: String,
    time: String,
    dry_run: bool,
    target_machine: TargetMachine,
    files: Vec<FileDocument>,
    rooms: Vec<RoomDocument>,
    /// A unified diff; none where the configuration stays as it is.
    configuration_diff: Option<String>,
    notes: Vec<String>,
    disks: Vec<DiskDone>,
    /// How it went with --live.
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
    /// Whether it goes on from its memory.
    is_resumed: bool,
    /// How far its clock is behind; null where it was set, or need not be.
    clock_behind_ms: Option<u64>,
}

#[derive(Debug, Serialize)]
struct FileDocument {
    /// "disk", "firmware-variables" or "tpm-state".
    content: &'static str,
    /// The disk.
    name: Option<String>,
    from: Option<String>,
    target: String,
    format: String,
    /// "new", "overwrite", "in-place", "replace" or "set-aside".
    way: &'static str,
    /// Where the file that was there is kept.
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

impl From<&PlannedFile> for FileDocument {
    fn from(file: &PlannedFile) -> Self {
        let (content, name) = match &file.content {
            Content::Disk(name) => ("disk", Some(name.clone())),
            Content::FirmwareVariables => ("firmware-variables", None),
            Content::TpmState(_) => ("tpm-state", None),
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

impl From<&Room> for RoomDocument {
    fn from(room: &Room) -> Self {
        Self {
            folder: room.folder.display().to_string(),
            needed_bytes: room.needed_bytes,
            free_bytes: room.free_bytes,
        }
    }
}

impl Done {
    /// The same with what is to be said of a machine that ran at once.
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
            files: plan.files.iter().map(FileDocument::from).collect(),
            rooms: plan.rooms.iter().map(RoomDocument::from).collect(),
            configuration_diff: plan.definition.as_ref().map(diff),
            notes: plan.notes.clone(),
            disks: disks.map(DiskDone::from).collect(),
            live: None,
            duration_ms: report.map_or(0, |report| units::millis(report.duration)),
        }
    }

    /// The machine that it is about.
    pub(crate) fn machine(&self) -> &str {
        &self.machine
    }

    /// The machine that it becomes: name and UUID.
    pub(crate) fn target(&self) -> (&str, &str) {
        (&self.target_machine.name, &self.target_machine.uuid)
    }

    /// The same of host snapshots.
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

    fn human_file(&self, file: &FileDocument, page: &mut Page) {
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

impl Report for Done {
    fn command(&self) -> &'static str {
        "restore"
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

impl Done {
    /// What was written, or would be.
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
                (true, _) => "; it goes on where it was",
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

/// What changes in the configuration, with a few lines around it.
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

/// Passwords of screens stand in configurations, and have no business on this one.
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

/// What the options say.
fn request(args: &RestoreArgs, context: &Context) -> Result<MachineRestoreRequest, Error> {
    let machine = &args.machine;
    if args.snapshot.disk.is_some() {
        return Err(Error::usage(
            "a machine is restored with all its disks",
            "name the snapshot only; a single disk is restored to a file or block device",
        ));
    }
    if args.force && machine.places.is_empty() {
        return Err(Error::usage(
            "--force is about files and block devices that --disk names",
            "leave it out; --in-place restores to the machine that is there",
        ));
    }
    let restore_as = if args.in_place {
        if args.format.is_some() {
            return Err(Error::usage(
                "--format is about new images, and in place the images are there",
                "leave it out",
            ));
        }
        RestoreAs::InPlace(InPlaceWish {
            machine: machine.name.clone(),
            configuration: if machine.configuration {
                ConfigurationChoice::Restore
            } else {
                ConfigurationChoice::Keep
            },
            presence: Presence::ShutOff,
        })
    } else {
        RestoreAs::NewMachine(NewMachineWish {
            name: machine.name.clone().map(MachineName::new).transpose()?,
            identity: if machine.keep_identity {
                NewMachineIdentity::Keep
            } else {
                NewMachineIdentity::New
            },
            storage: machine.storage.clone(),
            format: args.format,
            places: machine.places.iter().cloned().collect(),
            domain_type: machine.domain_type.clone(),
            overwrite: if args.force {
                Overwrite::Replace
            } else {
                Overwrite::Refuse
            },
        })
    };
    Ok(MachineRestoreRequest {
        name: args.snapshot.clone(),
        restore_as,
        after: match (machine.resume, machine.start) {
            (true, _) => AfterRestore::Resume,
            (_, true) => AfterRestore::Start,
            _ => AfterRestore::LeaveOff,
        },
        runtime: context.runtime_folder(),
        zone: context.zone().clone(),
    })
}

/// Restores a machine.
pub(super) fn run(args: &RestoreArgs, context: &Context) -> Result<Exit, Error> {
    let since = context.clock().now();
    let request = request(args, context)?;
    let uri = libvirt_address(args.machine.connect.as_deref(), context);
    let hypervisor = connect_libvirt(&uri, context)?;
    let repository = context.open_repository()?;
    let surroundings = context.surroundings();
    let threads = args.job.thread_count();
    let plan = context.work(threads, |job| {
        plan_machine_restore(&repository, &hypervisor, &request, &surroundings, job)
    })?;
    if args.machine.live {
        // A machine that does not start at once takes all of it away again.
        plan.refuse_unmet()?;
    }
    for warning in &plan.warnings {
        context.console().warning(warning);
    }
    if args.machine.dry_run {
        return context.report(&Done::new(&plan, None));
    }
    if args.machine.live {
        let storage = args.machine.storage.as_deref();
        let live = super::live::Live {
            repository: &repository,
            hypervisor: &hypervisor,
            storage,
            rate: FillRate::at_most(args.machine.bwlimit),
            since,
        };
        return live.run(&plan, context);
    }
    let _noted = runs::note_places(plan.files.iter().map(|file| file.to.as_path()), context);
    let report = context.work(threads, |job| {
        let report = restore_machine(&repository, &hypervisor, &plan, &surroundings, job)?;
        if args.in_place {
            StateArgs::default().forget_unfinished(&plan.machine.uuid, context, job);
        }
        Ok(report)
    })?;
    context.report(&Done::new(&plan, Some(&report)))
}

#[cfg(test)]
mod tests {
    use super::{parse_place, without_passwords};

    #[test]
    fn passwords_are_not_shown() {
        assert_eq!(
            without_passwords("<a passwd='s\"x'/><b passwd=\"y\" c='1'/><passwd=/>"),
            "<a passwd='***'/><b passwd=\"***\" c='1'/><passwd=/>"
        );
        assert_eq!(without_passwords("<a passwd='x"), "<a passwd='***'");
    }

    #[test]
    fn a_place_is_a_disk_and_a_path() {
        assert_eq!(parse_place("vda=/a=b").unwrap(), ("vda".to_owned(), "/a=b".into()));
        for text in ["vda", "=x", "vda="] {
            assert!(parse_place(text).is_err(), "{text}");
        }
    }
}
