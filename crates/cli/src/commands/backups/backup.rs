//! `holdfast backup`: backs up the disks of a machine as a snapshot.
//!
//! This file handles images and streams; `machines.rs` handles machines of hypervisors.

mod hooks;
mod limits;
mod machines;
mod machines_done;
mod of_containers;
mod of_pools;
mod of_virtualbox;
mod planned;
mod reading;

use std::ffi::OsString;
use std::path::PathBuf;

use holdfast_engine::{
    BackupReport, BackupRequest, Bottleneck, Continuation, MachineName, ParentChoice, SnapshotName, SnapshotOptions,
    SourceName, backup, plan_backup,
};
use holdfast_host::xapi::XenAddress;
use holdfast_image::Format;
use holdfast_repo::{Processes as _, SystemProcesses};
use jiff::Timestamp;
use serde::Serialize;

use self::machines::MachineBackupArgs;
pub(crate) use self::machines_done::InstantShown;
use self::of_pools::PoolBackupArgs;
use self::planned::BackupsPlanned;
pub(crate) use self::reading::{ReadingArgs, ReadingOptions};
use crate::args::parse_format;
use crate::args::{Example, JobArgs};
use crate::commands::verb::Verb;
use crate::context::Context;
use crate::context::standard_streams::{PatientInput, open_input};
use crate::errors::{Error, Kind};
use crate::exit::Exit;
use crate::machines::MachineWord;
use crate::machines::no_image;
use crate::output::snapshot::{SnapshotDocument, changed_bytes};
use crate::output::{Column, Page, Report, Table};
use crate::process::time;
use crate::units;

/// Arguments of `backup`.
#[derive(Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("what").required(true).multiple(true).args(["sources", "all"]))]
pub(crate) struct BackupArgs {
    /// Machines, by name or pattern ('web*'), as tag:TAG, qmp:SOCKET, vbox:NAME or xen://HOST/NAME; containers; or the disk images of one machine
    ///
    /// Machines of libvirt are named, matched by a pattern ('web*'), or chosen by a tag in their metadata
    /// (tag:TAG). qmp:SOCKET is the monitor of a QEMU without libvirt. vbox:NAME, vbox:UUID and vbox:FILE.vbox
    /// are machines of VirtualBox. xen://HOST/NAME, xen://USER@HOST/'web*' and xen://HOST (all) are machines of a
    /// XenServer or XCP-ng pool.
    ///
    /// A folder with a container.json is a container; container:FOLDER is one in any case, such as a ploop disk.
    ///
    /// Disk images and block devices have a `/` in their names, or exist in the current folder. NAME=IMAGE names
    /// the disk; `-` is standard input.
    #[arg(value_name = "SOURCE")]
    sources: Vec<OsString>,
    /// Name of the machine in the repository [default: the machine's own name, or the name of the first image]
    #[arg(short, long, value_name = "NAME")]
    machine: Option<MachineName>,
    /// Continue the snapshots of this name even though their UUID differs, or they are of images: it is the same machine, created again
    #[arg(long)]
    same_machine: bool,
    /// Tag the snapshot; may be repeated
    #[arg(short, long = "tag", value_name = "TAG")]
    tags: Vec<String>,
    /// Format of the images (raw, qcow2, vdi, vhd, vhdx, vmdk, parallels) [default: detected; block devices are raw]
    #[arg(long, value_name = "FORMAT", value_parser = parse_format)]
    format: Option<Format>,
    /// Allow a backing file in another folder, or a file or folder of a VirtualBox machine that lies elsewhere; may be repeated
    #[arg(long = "allow", value_name = "FILE")]
    allowed: Vec<PathBuf>,
    /// Compare with this snapshot [default: the newest of the machine]
    #[arg(long, value_name = "SNAPSHOT", conflicts_with = "no_parent")]
    parent: Option<SnapshotName>,
    /// Compare with no snapshot; all data is looked up in the repository
    #[arg(long)]
    no_parent: bool,
    /// Time of the snapshot [default: now]
    #[arg(long, value_name = "TIME", value_parser = time::parse)]
    time: Option<Timestamp>,
    /// Show what would be backed up, how, and how much would be read; change nothing and call no hooks
    #[arg(short = 'n', long)]
    dry_run: bool,
    #[command(flatten)]
    machines: MachineBackupArgs,
    #[command(flatten)]
    pools: PoolBackupArgs,
    #[command(flatten)]
    job: JobArgs,
}

impl BackupArgs {
    /// Returns an error if a source is standard input and that is closed.
    fn check_input(&self) -> Result<(), Error> {
        let is_input = |source: &OsString| source == "-" || source.as_encoded_bytes().ends_with(b"=-");
        if self.sources.iter().any(is_input) {
            open_input()?;
        }
        Ok(())
    }

    /// The user's statement about existing snapshots of the same name.
    fn continuation(&self) -> Continuation {
        crate::args::Switch::continuation(self.same_machine)
    }

    /// The name under which the machine that its hypervisor calls `name` is listed; `word` is the argument if
    /// it names only this machine.
    fn listed(&self, name: &str, word: &str) -> Result<MachineName, Error> {
        match &self.machine {
            Some(listed) => Ok(listed.clone()),
            None => MachineName::new(name).map_err(|error| {
                Error::refused(
                    Kind::BadName,
                    format!("{word}: {error}"),
                    format!("back it up by itself, under a name of yours: holdfast backup --machine NAME -- '{word}'"),
                )
            }),
        }
    }
}

impl Verb for BackupArgs {
    const EXAMPLES: &'static [Example] = &[
        Example {
            wish: "Back up a running machine",
            line: "holdfast backup -r /backup/vms web1",
        },
        Example {
            wish: "Back up all machines except some",
            line: "holdfast backup -r /backup/vms --all --exclude-machine 'test-*'",
        },
        Example {
            wish: "See what would be backed up, and how much would be read",
            line: "holdfast backup -r /backup/vms --all --dry-run",
        },
        Example {
            wish: "Back up a machine of a QEMU that was started by hand, by its monitor",
            line: "holdfast backup -r /backup/vms qmp:/run/web1.qmp",
        },
        Example {
            wish: "Back up all machines of VirtualBox, running or not",
            line: "holdfast backup -r /backup/vms vbox:",
        },
        Example {
            wish: "Back up a machine of XenServer or XCP-ng",
            line: "holdfast backup -r /backup/vms xen://xen1/web1 --pool-password-file /etc/holdfast/xen1",
        },
        Example {
            wish: "Back up a container, mounted or not",
            line: "holdfast backup -r /backup/vms container:/srv/web1",
        },
        Example {
            wish: "Call your own programs (hooks)",
            line: "holdfast backup -r /backup/vms db1 --hook /etc/holdfast/quiesce-db --hook-timeout 60",
        },
        Example {
            wish: "Limit the load on a busy machine",
            line: "holdfast backup -r /backup/vms db1 --bwlimit 50M --max-latency 20 --scratch-max 10G",
        },
        Example {
            wish: "Read a machine while it is paused",
            line: "holdfast backup -r /backup/vms web1 --method pause",
        },
        Example {
            wish: "Back up an image",
            line: "holdfast backup -r /backup/vms /var/lib/libvirt/images/web1.qcow2",
        },
        Example {
            wish: "Back up two disks of one machine, with names of their own",
            line: "holdfast backup -r /backup/vms --machine db vda=/dev/vg/db-root vdb=/dev/vg/db-data",
        },
        Example {
            wish: "Back up a stream",
            line: "zfs send tank/web1@now | holdfast backup -r /backup/vms --machine web1 zfs=-",
        },
    ];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        run(self, context)
    }
}

/// Report of `backup`.
#[derive(Debug, Serialize)]
struct ImagesBackedUp {
    snapshot: SnapshotDocument,
    read_bytes: u64,
    changed_bytes: u64,
    stored_bytes: u64,
    duration_ms: u64,
    read_bytes_per_second: Option<u64>,
    /// "source", "cpu" or "target".
    bottleneck: Option<&'static str>,
    #[serde(skip)]
    limit: Option<String>,
}

impl From<BackupReport> for ImagesBackedUp {
    fn from(report: BackupReport) -> Self {
        let statistics = report.snapshot.statistics();
        Self {
            read_bytes: statistics.read_bytes,
            changed_bytes: changed_bytes(&statistics),
            stored_bytes: report.stored_bytes,
            duration_ms: units::millis(report.duration),
            read_bytes_per_second: units::rate(statistics.read_bytes, report.duration),
            bottleneck: report.bottleneck.map(Bottleneck::word),
            limit: report.bottleneck.map(|bottleneck| bottleneck.to_string()),
            snapshot: SnapshotDocument::from(&report.snapshot),
        }
    }
}

impl Report for ImagesBackedUp {
    fn command(&self) -> &'static str {
        "backup"
    }

    fn is_confirmation(&self) -> bool {
        true
    }

    fn human(&self, page: &mut Page) {
        let mut parts = vec![
            format!("{} read", units::bytes(self.read_bytes)),
            format!("{} changed", units::bytes(self.changed_bytes)),
        ];
        let stored = units::bytes(self.stored_bytes);
        parts.push(if self.stored_bytes < self.read_bytes {
            format!(
                "{stored} stored ({})",
                units::percent(self.stored_bytes, self.read_bytes)
            )
        } else {
            format!("{stored} stored")
        });
        parts.push(units::duration(std::time::Duration::from_millis(self.duration_ms)));
        parts.extend(self.read_bytes_per_second.map(units::bytes_per_second));
        parts.extend(self.limit.as_ref().map(|what| format!("limited by {what}")));
        let snapshot = &self.snapshot;
        page.line(&format!(
            "{}  snapshot {}  {}",
            snapshot.machine,
            &snapshot.id[..8],
            parts.join(", ")
        ));
        if snapshot.disks.len() < 2 {
            return;
        }
        let mut table = Table::new([
            Column::long_text("DISK"),
            Column::number("SIZE"),
            Column::number("READ"),
            Column::number("CHANGED"),
            Column::number("NEW"),
        ]);
        for disk in &snapshot.disks {
            table.row([
                disk.name.clone(),
                units::bytes(disk.size_bytes),
                units::bytes(disk.statistics.read_bytes),
                units::bytes(changed_bytes(&disk.statistics)),
                units::bytes(disk.statistics.new_bytes),
            ]);
        }
        page.table(&table);
    }
}

impl BackupArgs {
    fn snapshot_options(&self, context: &Context) -> Result<SnapshotOptions, Error> {
        let parent = match &self.parent {
            Some(SnapshotName { disk: Some(_), .. }) => {
                return Err(Error::usage(
                    "--parent names a disk",
                    "name the snapshot only: disks are compared with those of the same name",
                ));
            }
            Some(name) => ParentChoice::Named(name.snapshot.clone()),
            None if self.no_parent => ParentChoice::None,
            None => ParentChoice::Newest,
        };
        Ok(SnapshotOptions {
            parent,
            continuation: self.continuation(),
            tags: self.tags.clone(),
            host: SystemProcesses.this().host,
            program: crate::PROGRAM.to_owned(),
            zone: context.zone().clone(),
        })
    }
}

fn run(args: &BackupArgs, context: &Context) -> Result<Exit, Error> {
    let snapshot = args.snapshot_options(context)?;
    let wrong =
        |word: &&OsString| word.to_str().is_some_and(XenAddress::has_scheme) && MachineWord::parse(word).is_none();
    if let Some(word) = args.sources.iter().find(wrong).and_then(|word| word.to_str()) {
        word.parse::<XenAddress>().map_err(holdfast_engine::Error::from)?;
    }
    let of_machines = args
        .sources
        .iter()
        .filter_map(|word| Some((MachineWord::parse(word)?, word)));
    let (words, named): (Vec<_>, Vec<_>) = of_machines.unzip();
    if words.len() == args.sources.len() {
        if args.format.is_some() || args.time.is_some() {
            return Err(Error::usage(
                "--format and --time are about images, and these are machines",
                "remove these options; the name of an image contains a /, or is an existing file",
            ));
        }
        return machines::run(words, args, &snapshot, context);
    }
    if let Some(name) = named.first() {
        return Err(Error::usage(
            format!(
                "{} is not a file, and machines and images cannot be backed up together",
                name.display()
            ),
            "check the name of the image; back up machines by themselves",
        ));
    }
    if let Some(option) = args.machines.given().or_else(|| args.pools.given()) {
        return Err(Error::usage(
            format!("{option} is about machines, and these are images"),
            "remove the option",
        ));
    }
    if args.format.is_none() {
        args.sources.iter().try_for_each(|word| no_image::refuse(word))?;
    }
    let sources = args.sources.iter().map(|image| SourceName::parse(image));
    let sources = sources.collect::<Result<_, _>>()?;
    args.check_input()?;
    let repository = context.open_repository()?;
    let mut stdin = PatientInput::of_standard_input(context)?;
    let request = BackupRequest {
        sources,
        machine: args.machine.clone(),
        format: args.format,
        allowed: args.allowed.clone(),
        snapshot,
        time: args.time.unwrap_or_else(time::now),
        stdin: &mut stdin,
    };
    if args.dry_run {
        let plan = context.work(args.job.thread_count(), |job| plan_backup(&repository, &request, job))?;
        return context.report(&BackupsPlanned::new(vec![plan.into()], Vec::new(), Vec::new()));
    }
    let report = context.work(args.job.thread_count(), |job| backup(&repository, request, job))?;
    context.report(&ImagesBackedUp::from(report))
}
