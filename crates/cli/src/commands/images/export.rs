//! `holdfast export`: writes a machine in a snapshot to an archive for another hypervisor, or to a folder of
//! images.

mod kind;
mod now;
mod planned;
mod to_pool;

use std::path::{Path, PathBuf};

use holdfast_archive::{PackOptions, Packing};
use holdfast_engine::{
    ExportFormat, ExportFrom, ExportReport, ExportRequest, ExportTarget, Overwrite, SnapshotName, VirtualBoxIdentity,
    XvaExport, export, plan_export,
};
use holdfast_host::virtualbox::VBoxManage;
use holdfast_host::xapi::XenAddress;
use holdfast_image::{Format, Storage};
use holdfast_repo::{Processes as _, SystemProcesses};
use serde::Serialize;

use self::kind::{ExportKind, kind_of};
use self::now::{ExportInstantDocument, NowArgs};
use self::planned::ExportPlanned;
use crate::args::PoolArgs;
use crate::args::{Example, JobArgs};
use crate::commands::images::compress::{PackingArgs, threads};
use crate::commands::images::import::{DroppedDocument, list_dropped};
use crate::commands::verb::Verb;
use crate::context::Context;
use crate::context::standard_streams::{StandardOutput, refuse_terminal};
use crate::errors::Error;
use crate::exit::Exit;
use crate::machines::runs;
use crate::machines::virtualbox;
use crate::output::{Column, Page, Report, Table};
use crate::process::time;
use crate::units;

/// Arguments of `export`.
#[expect(clippy::struct_excessive_bools, reason = "options that are given or not")]
#[derive(Debug, clap::Args)]
pub(crate) struct ExportArgs {
    /// The snapshot; a machine's name means its newest. With --now: a libvirt machine by name, or qmp:SOCKET
    #[arg(value_name = "SNAPSHOT|MACHINE")]
    what: String,
    /// The archive or folder to create, `-` for standard output, or a XenServer or XCP-ng pool: xen://HOST, xen://HOST/STORAGE
    #[arg(value_name = "TARGET")]
    target: PathBuf,
    /// What to make: xva for XenServer and XCP-ng, ova for VMware and VirtualBox, vma for Proxmox, vbox for a
    /// VirtualBox folder with settings and VDI images, dir for a folder with images and a libvirt configuration
    /// [default: by the target's name]
    #[arg(long = "format", value_name = "FORMAT", value_enum)]
    format: Option<ExportKind>,
    #[command(flatten)]
    packing: PackingArgs,
    /// Format of the images in a folder (raw, qcow2, vdi, vhd, vhdx, vmdk, parallels)
    #[arg(long, value_name = "FORMAT", value_parser = crate::args::parse_format)]
    disk_format: Option<Format>,
    /// Exclude this disk; may be repeated
    #[arg(long = "exclude", value_name = "DISK")]
    left_out: Vec<String>,
    /// Name of the exported machine
    #[arg(long, value_name = "NAME", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    name: Option<String>,
    /// Replace an existing file
    #[arg(long)]
    force: bool,
    /// Register the machine with VirtualBox (VBoxManage)
    #[arg(long)]
    register: bool,
    /// Give the machine a new UUID and new network addresses (VirtualBox and pools)
    #[arg(long)]
    new_identity: bool,
    /// Include the saved memory of a pool machine that was backed up --with-memory: it resumes where it was
    #[arg(long)]
    with_memory: bool,
    /// Check the target, and show what would be exported; write nothing
    #[arg(short = 'n', long)]
    dry_run: bool,
    #[command(flatten)]
    pools: PoolArgs,
    #[command(flatten)]
    job: JobArgs,
    #[command(flatten)]
    now: NowArgs,
}

impl Verb for ExportArgs {
    const EXAMPLES: &'static [Example] = &[
        Example {
            wish: "Move a machine to XCP-ng",
            line: "holdfast export -r /backup/vms web1 web1.xva.zst",
        },
        Example {
            wish: "Bring it back to its pool, or to another one",
            line: "holdfast export -r /backup/vms web1 xen://xen1/local-storage",
        },
        Example {
            wish: "Resume it in its pool, if it was backed up --with-memory",
            line: "holdfast export -r /backup/vms web1 xen://xen1/local-storage --with-memory",
        },
        Example {
            wish: "Send it there at once",
            line: "holdfast export -r /backup/vms web1@2026-11-20 - --format xva | ssh xen1 xe vm-import filename=/dev/stdin",
        },
        Example {
            wish: "Move a machine as it runs to another hypervisor, without a repository",
            line: "holdfast export --now web1 - --format xva | ssh xen1 xe vm-import filename=/dev/stdin",
        },
        Example {
            wish: "Make a package for VMware or VirtualBox",
            line: "holdfast export -r /backup/vms web1 web1.ova",
        },
        Example {
            wish: "Export a machine for Proxmox (qmrestore)",
            line: "holdfast export -r /backup/vms web1 vzdump-qemu-100-2026_11_23-12_00_00.vma.zst",
        },
        Example {
            wish: "Export a machine back to VirtualBox, beside the existing one",
            line: "holdfast export -r /backup/vms web1 '/home/ana/VirtualBox VMs/web1b' --format vbox --name web1b --new-identity --register",
        },
        Example {
            wish: "Make images for VirtualBox",
            line: "holdfast export -r /backup/vms web1 /srv/web1 --format dir --disk-format vdi",
        },
    ];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        run(self, context)
    }
}

/// Report of `export`.
#[derive(Debug, Serialize)]
struct ExportDone {
    dry_run: bool,
    target: String,
    format: &'static str,
    /// The snapshot; null for a machine that was read directly.
    snapshot: Option<String>,
    machine: String,
    name: String,
    disks: Vec<ExportedDisk>,
    written_bytes: u64,
    dropped: Vec<DroppedDocument>,
    duration_ms: u64,
    /// The settings of a machine of VirtualBox.
    settings: Option<String>,
    is_registered: bool,
    /// The machine in a pool of XenServer.
    uuid: Option<String>,
    /// How the machine was read; null for a snapshot.
    instant: Option<ExportInstantDocument>,
    /// Bytes of memory from which it resumes; null if it starts afresh.
    memory_bytes: Option<u64>,
}

#[derive(Debug, Serialize)]
struct ExportedDisk {
    name: String,
    key: String,
    size_bytes: u64,
}

impl ExportDone {
    fn new(report: ExportReport, target: String, kind: ExportKind) -> Self {
        let disk = |(name, key, size_bytes)| ExportedDisk { name, key, size_bytes };
        Self {
            dry_run: false,
            target,
            format: kind.word(),
            settings: report.settings_file.map(|path| path.display().to_string()),
            is_registered: false,
            uuid: None,
            memory_bytes: report.memory_bytes,
            snapshot: report.snapshot.as_ref().map(|snapshot| snapshot.id.to_string()),
            instant: report.reading.as_ref().map(ExportInstantDocument::new),
            machine: report.machine,
            name: report.name,
            disks: report.disks.into_iter().map(disk).collect(),
            written_bytes: report.written_bytes,
            dropped: report.dropped.iter().map(DroppedDocument::from).collect(),
            duration_ms: units::millis(report.duration),
        }
    }
}

impl ExportDone {
    /// A machine that was exported to a pool.
    fn in_pool(report: ExportReport, target: String, uuid: String) -> Self {
        Self {
            uuid: Some(uuid),
            ..Self::new(report, target, ExportKind::Xva)
        }
    }
}

impl Report for ExportDone {
    fn command(&self) -> &'static str {
        "export"
    }

    fn is_confirmation(&self) -> bool {
        true
    }

    fn human(&self, page: &mut Page) {
        let duration = std::time::Duration::from_millis(self.duration_ms);
        let size_bytes: u64 = self.disks.iter().map(|disk| disk.size_bytes).sum();
        let mut parts = vec![
            format!("{} written", units::bytes(self.written_bytes)),
            units::duration(duration),
        ];
        parts.extend(
            units::rate(size_bytes, duration).map(|rate| format!("{} of disks", units::bytes_per_second(rate))),
        );
        let of = match &self.snapshot {
            Some(snapshot) => format!("as of snapshot {}", &snapshot[..8]),
            None => "as it was at this moment".to_owned(),
        };
        page.line(&format!("{}  {} {of}: {}", self.target, self.name, parts.join(", ")));
        let instant = self.instant.iter().flat_map(|instant| &instant.lines);
        instant.for_each(|line| page.line(line));
        let mut table = Table::new([
            Column::long_text("DISK"),
            Column::number("SIZE"),
            Column::long_text("THERE"),
        ]);
        for disk in &self.disks {
            table.row([disk.name.clone(), units::bytes(disk.size_bytes), disk.key.clone()]);
        }
        page.table(&table);
        if let Some(settings) = &self.settings {
            page.line(&if self.is_registered {
                format!("VirtualBox lists it: {settings}")
            } else {
                format!("VBoxManage registervm adds it to VirtualBox: {settings}")
            });
        }
        let memory = self.memory_bytes.map(units::bytes);
        match (&self.uuid, memory) {
            (Some(uuid), None) => page.line(&format!("the pool has it as {uuid}")),
            (Some(uuid), Some(memory)) => page.line(&format!(
                "the pool has it as {uuid}, suspended with {memory} of memory: xe vm-resume uuid={uuid} resumes it"
            )),
            (None, Some(memory)) => page.line(&format!(
                "it is suspended with {memory} of memory: import it with xe vm-import preserve=true filename={}, and resume it with xe vm-resume",
                self.target
            )),
            (None, None) => {}
        }
        list_dropped(&self.dropped, page);
    }
}

fn run(args: &ExportArgs, context: &Context) -> Result<Exit, Error> {
    check_source(args)?;
    if let Some(address) = args.target.to_str().filter(|text| XenAddress::has_scheme(text)) {
        return to_pool::run(args, address, context);
    }
    args.pools.refuse("what is made")?;
    let is_stdout = args.target.as_os_str() == "-";
    let (kind, named) = kind_of(args)?;
    let packing = PackOptions {
        packing: args.packing.packing().or(named).unwrap_or(Packing::None),
        level: args.packing.level(),
        threads: threads(args.job.thread_count(), None),
    };
    let format = match kind {
        ExportKind::Ova => ExportFormat::Ova {
            level: args.packing.level().and_then(|level| u32::try_from(level).ok()),
        },
        ExportKind::Vma => ExportFormat::Vma(packing),
        ExportKind::Xva | ExportKind::Vbox | ExportKind::Dir => ExportFormat::Xva(XvaExport {
            packing,
            resumes: args.with_memory,
        }),
    };
    let target = target_of(args, kind, format, context)?;
    let place = virtualbox::place(context);
    let manager = match place.manager() {
        None if args.register => return Err(virtualbox::no_manager("--register")),
        manager => manager.filter(|_| args.register),
    };
    let request = ExportRequest {
        target,
        name: args.name.clone(),
        host: SystemProcesses.this().host,
        time: time::now(),
    };
    if args.dry_run {
        let plan = from(args, context, |from| {
            context.work(args.job.thread_count(), |job| plan_export(from, request, job))
        })?;
        return context.report(&ExportPlanned::new(plan, args.target.display().to_string(), kind));
    }
    let _noted = runs::note_places((!is_stdout).then_some(&*args.target), context);
    let report = from(args, context, |from| {
        context.work(args.job.thread_count(), |job| {
            export(from, request, &context.environment(), job)
        })
    })?;
    if is_stdout {
        note_losses(&report, context);
        return Ok(Exit::Ok);
    }
    let settings = report.settings_file.clone();
    let mut done = ExportDone::new(report, args.target.display().to_string(), kind);
    if let (Some(manager), Some(settings)) = (manager, settings) {
        // If this fails, the folder is complete all the same, and can be registered later.
        done.is_registered = is_registered(manager, &settings, context);
    }
    context.report(&done)
}

/// Registers the machine with VirtualBox. If that fails, the folder is complete all the same, and can be registered
/// later.
fn is_registered(manager: &VBoxManage, settings: &Path, context: &Context) -> bool {
    let Err(error) = manager.register(settings) else {
        return true;
    };
    let text = error.to_string();
    let advice = if text.contains("already exists") {
        "; --new-identity makes it another machine"
    } else {
        ""
    };
    let message = format!("VirtualBox refuses to register it: {text}{advice}");
    context.console().warning(&message);
    false
}

/// Calls `work` with the source of the export.
fn from<T>(
    args: &ExportArgs,
    context: &Context,
    work: impl FnOnce(ExportFrom<'_>) -> Result<T, Error>,
) -> Result<T, Error> {
    if args.now.is_wanted {
        return now::from(args, context, work);
    }
    let repository = context.open_repository()?;
    work(ExportFrom::Snapshot {
        repository: &repository,
        reference: snapshot_name(&args.what)?.snapshot,
        zone: context.zone().clone(),
        left_out: args.left_out.clone(),
    })
}

fn snapshot_name(text: &str) -> Result<SnapshotName, Error> {
    text.parse().map_err(|error| {
        Error::usage(
            format!("{text}: {error}"),
            "holdfast list shows all snapshots; --now exports a machine as it is",
        )
    })
}

/// Returns an error if options do not fit the source.
fn check_source(args: &ExportArgs) -> Result<(), Error> {
    if args.with_memory && args.new_identity {
        return Err(Error::usage(
            "--with-memory and --new-identity do not go together: the memory of the machine contains its old addresses, which the original machine uses",
            "remove one of them; without --with-memory the machine boots, and can take a new identity",
        ));
    }
    if args.now.is_wanted {
        if args.with_memory {
            return Err(Error::usage(
                "--with-memory is for machines backed up from a pool, and --now for running machines of libvirt or QEMU",
                "remove one of them; holdfast backup --with-memory saves the memory of a running machine",
            ));
        }
        return args.now.reading.check();
    }
    if let Some(option) = args.now.reading.given() {
        return Err(Error::usage(
            format!("{option} is for exports of a running machine, and this is a snapshot"),
            "remove the option, or add --now",
        ));
    }
    match snapshot_name(&args.what)?.disk {
        None => Ok(()),
        Some(_) => Err(Error::usage(
            "this names a disk, and only whole machines are exported",
            "remove the disk from the name; --exclude skips disks, and holdfast restore restores one disk",
        )),
    }
}

/// Prints the report to standard error if the archive goes to standard output.
fn note_losses(report: &ExportReport, context: &Context) {
    if report.memory_bytes.is_some() {
        let note = "it is suspended: import it with xe vm-import preserve=true, and resume it with xe vm-resume";
        context.console().note(note);
    }
    for dropped in &report.dropped {
        context.console().note(&format!("not carried over: {dropped}"));
    }
}

/// The target of the export.
fn target_of(
    args: &ExportArgs,
    kind: ExportKind,
    format: ExportFormat,
    context: &Context,
) -> Result<ExportTarget, Error> {
    Ok(match kind {
        ExportKind::Xva | ExportKind::Ova | ExportKind::Vma if args.target.as_os_str() == "-" && args.dry_run => {
            ExportTarget::Stream(Box::new(std::io::sink()), format)
        }
        ExportKind::Xva | ExportKind::Ova | ExportKind::Vma if args.target.as_os_str() == "-" => {
            context.output().refuse_json("export to standard output")?;
            refuse_terminal()?;
            ExportTarget::Stream(Box::new(StandardOutput::open(context)?), format)
        }
        ExportKind::Xva | ExportKind::Ova | ExportKind::Vma => ExportTarget::File {
            path: args.target.clone(),
            overwrite: if args.force {
                Overwrite::Replace
            } else {
                Overwrite::Refuse
            },
            format,
        },
        ExportKind::Vbox => ExportTarget::VirtualBox {
            path: args.target.clone(),
            identity: if args.new_identity {
                VirtualBoxIdentity::New
            } else {
                VirtualBoxIdentity::Same
            },
        },
        ExportKind::Dir if args.name.is_some() => {
            return Err(Error::usage(
                "--name is what another hypervisor calls the machine, and a folder of images has its configuration as it was",
                "remove the option",
            ));
        }
        ExportKind::Dir => ExportTarget::Folder {
            path: args.target.clone(),
            format: args.disk_format.unwrap_or(Format::Qcow2),
            storage: Storage::Plain,
        },
    })
}
