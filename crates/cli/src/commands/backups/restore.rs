//! `holdfast restore`: restores a snapshot to files, block devices, a stream or a machine.

mod container;
pub(crate) mod done;
mod live;
mod machine;

use std::ffi::OsString;
use std::path::Path;

use holdfast_engine::{
    Execution, RestoreMode, RestoreReport, RestoreRequest, RestoreTarget, RestoredDisk, SnapshotName, restore,
};
use holdfast_image::Format;
use serde::Serialize;

use self::container::ContainerRestoreArgs;
use self::machine::MachineRestoreArgs;
use crate::args::{Example, JobArgs, Switch as _};
use crate::commands::verb::Verb;
use crate::context::Context;
use crate::context::standard_streams::{StandardOutput, refuse_terminal, stopped_or};
use crate::errors::Error;
use crate::exit::Exit;
use crate::machines::runs;
use crate::output::{Page, Report};
use crate::units;

/// Arguments of `restore`.
#[derive(Debug, clap::Args)]
pub(crate) struct RestoreArgs {
    /// The snapshot (ID, MACHINE, MACHINE@TIME); with :DISK one of its disks
    #[arg(value_name = "SNAPSHOT[:DISK]")]
    snapshot: SnapshotName,
    /// A new file, a folder for one file per disk, a block device, or `-` for standard output
    #[arg(value_name = "TARGET")]
    target: Option<OsString>,
    /// Overwrite the existing file, block device or machine; write only what differs
    #[arg(long, conflicts_with = "force")]
    in_place: bool,
    /// Replace an existing file, or overwrite a block device
    #[arg(long)]
    force: bool,
    /// Format of the target (raw, qcow2, vdi, vhd, vhdx, vmdk, parallels) [default: by the name of a new file, by
    /// the content of an existing one]
    #[arg(long, value_name = "FORMAT", value_parser = crate::args::parse_format)]
    format: Option<Format>,
    /// Read the snapshot and the target, show what would be written and defined; change nothing
    #[arg(short = 'n', long)]
    dry_run: bool,
    #[command(flatten)]
    job: JobArgs,
    #[command(flatten)]
    container: ContainerRestoreArgs,
    #[command(flatten)]
    machine: MachineRestoreArgs,
}

impl Verb for RestoreArgs {
    const EXAMPLES: &'static [Example] = &[
        Example {
            wish: "Restore the newest snapshot of a machine to a new file",
            line: "holdfast restore -r /backup/vms web1 /var/lib/libvirt/images/web1.raw",
        },
        Example {
            wish: "Restore one disk as it was, writing only what differs",
            line: "holdfast restore -r /backup/vms db@2026-11-20T10:00:vda /dev/vg/db-root --in-place",
        },
        Example {
            wish: "See how much of it differs, without writing",
            line: "holdfast restore -r /backup/vms db@2026-11-20T10:00:vda /dev/vg/db-root --in-place --dry-run",
        },
        Example {
            wish: "Restore all disks of a machine into a folder",
            line: "holdfast restore -r /backup/vms db /var/lib/restored",
        },
        Example {
            wish: "Restore to a stream",
            line: "holdfast restore -r /backup/vms web1 - | dd of=/dev/vg/web1 bs=1M",
        },
        Example {
            wish: "Restore a container to a new folder",
            line: "holdfast restore -r /backup/vms web1 --to-container /srv/web1-restored",
        },
        Example {
            wish: "Write the files of a container to an archive",
            line: "holdfast restore -r /backup/vms web1@2026-11-20 --to-tar web1.tar",
        },
        Example {
            wish: "See what a new machine beside the old one would be; without --dry-run it is made",
            line: "holdfast restore -r /backup/vms web1 --to-machine --name web1-test --dry-run",
        },
        Example {
            wish: "Restore a machine that is gone, with the same identity",
            line: "holdfast restore -r /backup/vms web1 --to-machine --keep-identity --start",
        },
        Example {
            wish: "Run it at once, from the snapshot; its images are filled while it runs",
            line: "holdfast restore -r /backup/vms web1 --to-machine --keep-identity --live",
        },
        Example {
            wish: "Restore a machine that is shut off to yesterday, writing only what differs",
            line: "holdfast restore -r /backup/vms web1@2026-11-20 --to-machine --in-place",
        },
    ];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        run(self, context)
    }
}

/// Report of `restore`.
#[derive(Debug, Serialize)]
struct FilesRestored {
    dry_run: bool,
    id: String,
    machine: String,
    time: String,
    disks: Vec<RestoredDiskDocument>,
    duration_ms: u64,
}

#[derive(Debug, Serialize)]
struct RestoredDiskDocument {
    name: String,
    target: Option<String>,
    size_bytes: u64,
    written_bytes: u64,
    equal_bytes: u64,
    zero_bytes: u64,
}

impl From<&RestoredDisk> for RestoredDiskDocument {
    fn from(disk: &RestoredDisk) -> Self {
        Self {
            name: disk.name.clone(),
            target: disk.target.as_ref().map(|path| path.display().to_string()),
            size_bytes: disk.size_bytes,
            written_bytes: disk.written_bytes,
            equal_bytes: disk.equal_bytes,
            zero_bytes: disk.zero_bytes,
        }
    }
}

impl FilesRestored {
    fn new(report: &RestoreReport, execution: Execution) -> Self {
        Self {
            dry_run: execution == Execution::DryRun,
            id: report.snapshot.id.to_string(),
            machine: report.snapshot.machine.clone(),
            time: holdfast_engine::time_of(&report.snapshot).to_string(),
            disks: report.disks.iter().map(RestoredDiskDocument::from).collect(),
            duration_ms: units::millis(report.duration),
        }
    }
}

impl Report for FilesRestored {
    fn command(&self) -> &'static str {
        "restore"
    }

    fn is_confirmation(&self) -> bool {
        !self.dry_run
    }

    fn human(&self, page: &mut Page) {
        let written = if self.dry_run { "would be written" } else { "written" };
        for disk in &self.disks {
            let mut parts = vec![
                format!("{} disk", units::bytes(disk.size_bytes)),
                format!("{} {written}", units::bytes(disk.written_bytes)),
            ];
            if disk.equal_bytes > 0 {
                parts.push(format!("{} were there already", units::bytes(disk.equal_bytes)));
            }
            page.line(&format!(
                "{}:{}  snapshot {}  to {}: {}",
                self.machine,
                disk.name,
                &self.id[..8],
                disk.target.as_deref().unwrap_or("standard output"),
                parts.join(", ")
            ));
        }
        if self.dry_run {
            page.line("nothing was changed; run the command without --dry-run to restore");
            return;
        }
        let size_bytes = self.disks.iter().map(|disk| disk.size_bytes).sum();
        let duration = std::time::Duration::from_millis(self.duration_ms);
        let rate = units::rate(size_bytes, duration).map(units::bytes_per_second);
        let rate = rate.map(|rate| format!(", {rate}")).unwrap_or_default();
        page.line(&format!("restored in {}{rate}", units::duration(duration)));
    }
}

/// The target; none if a machine is restored. Reports all options that make no sense for the target in one message.
fn place(args: &RestoreArgs) -> Result<Option<&OsString>, Error> {
    match (&args.target, args.machine.to_machine, args.machine.out_of_place()) {
        (Some(target), true, _) => Err(Error::usage(
            format!(
                "--to-machine restores to a machine, and {} is another target",
                target.display()
            ),
            "remove one of the two; --storage FOLDER and --disk DISK=PATH set where the images of a machine are written",
        )),
        (Some(_), false, Some(option)) => Err(Error::usage(
            format!("{option} needs --to-machine"),
            "remove the option, or use --to-machine instead of the target",
        )),
        (None, false, Some(option)) => Err(Error::usage(
            format!("{option} needs --to-machine"),
            "add --to-machine, or name a target instead",
        )),
        (None, false, None) => Err(Error::usage(
            "a restore needs a target",
            "name a file, a folder, a block device, or - for standard output; or use --to-machine for a machine of a hypervisor, or --to-container for a container",
        )),
        (target, ..) => Ok(target.as_ref()),
    }
}

fn run(args: &RestoreArgs, context: &Context) -> Result<Exit, Error> {
    if let Some(target) = args.container.target() {
        return container::run(args, target, context);
    }
    let Some(target) = place(args)? else {
        return machine::run(args, context);
    };
    let is_stream = target == "-";
    if is_stream {
        context.output().refuse_json("restore to standard output")?;
        // The description of a machine is text that a user may want to read on the terminal.
        let disk = args.snapshot.disk.as_ref();
        let ending = disk
            .and_then(|name| name.as_str().rsplit_once('.'))
            .map(|(_, ending)| ending);
        if ending != Some("xml") {
            refuse_terminal()?;
        }
        if args.in_place || args.force || args.dry_run || args.format.is_some_and(|format| format != Format::Raw) {
            return Err(Error::usage(
                "--in-place, --force, --dry-run and formats other than raw are for files and block devices",
                "remove these options, or restore to a file",
            ));
        }
    }
    let mode = match (args.in_place, args.force) {
        (true, _) => RestoreMode::InPlace,
        (false, true) => RestoreMode::Replace,
        (false, false) => RestoreMode::New,
    };
    let repository = context.open_repository()?;
    let file = (!is_stream).then(|| Path::new(target));
    let _noted = runs::note_places(file, context);
    let mut stdout = is_stream.then(|| StandardOutput::open(context)).transpose()?;
    let target = if let Some(stdout) = &mut stdout {
        RestoreTarget::Stream(stdout)
    } else {
        RestoreTarget::Path(target.into())
    };
    let request = RestoreRequest {
        name: args.snapshot.clone(),
        target,
        mode,
        execution: args.dry_run.execution(),
        format: args.format,
        zone: context.zone().clone(),
    };
    let report = context.work(args.job.thread_count(), |job| {
        stopped_or(restore(&repository, request, &context.environment(), job), job)
    })?;
    if is_stream {
        // Standard output contains only the disk.
        let warning_count = context.console().warnings().len();
        return Ok(Exit::Ok.with_warning_count(warning_count));
    }
    context.report(&FilesRestored::new(&report, args.dry_run.execution()))
}
