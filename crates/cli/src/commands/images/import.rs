//! `holdfast import`: imports the machine in an archive to a snapshot, or to images in a folder.

use std::io::Read;
use std::path::{Path, PathBuf};

use holdfast_archive::StreamImages;
use holdfast_engine::{
    Domain, ImportFolder, ImportRepository, Imported, Job, MachineName, ParentChoice, SnapshotOptions, open_import,
    wants_stored_images,
};
use holdfast_image::{Format, Storage};
use holdfast_repo::{Processes as _, SystemProcesses};
use jiff::Timestamp;
use serde::Serialize;

use crate::args::{Example, JobArgs};
use crate::commands::images::compress;
use crate::commands::verb::Verb;
use crate::context::Context;
use crate::errors::Error;
use crate::exit::Exit;
use crate::machines::runs;
use crate::output::snapshot::SnapshotDocument;
use crate::output::{Column, Page, Report, Table};
use crate::process::time;
use crate::units;

/// Arguments of `import`.
#[derive(Debug, clap::Args)]
#[expect(clippy::struct_excessive_bools, reason = "options that are given or not")]
pub(crate) struct ImportArgs {
    /// The archive (XVA, OVA or VMA; plain, gzip, zstd or xz), or `-` for standard input
    #[arg(value_name = "ARCHIVE")]
    archive: PathBuf,
    /// Write images and a libvirt configuration to this new folder, instead of a snapshot
    #[arg(long = "to", value_name = "FOLDER")]
    folder: Option<PathBuf>,
    /// Format of the images (raw, qcow2, vdi, vhd, vhdx, vmdk, parallels)
    #[arg(long, value_name = "FORMAT", value_parser = crate::args::parse_format, requires = "folder")]
    format: Option<Format>,
    /// Compress the images (qcow2)
    #[arg(short, long, requires = "folder")]
    compress: bool,
    /// Name of the machine in the repository [default: its own]
    #[arg(short, long, value_name = "NAME", conflicts_with = "folder")]
    machine: Option<MachineName>,
    /// Continue the snapshots of this name even though their UUID differs: it is the same machine
    #[arg(long, conflicts_with = "folder")]
    same_machine: bool,
    /// Tag the snapshot; may be repeated
    #[arg(short, long = "tag", value_name = "TAG", conflicts_with = "folder")]
    tags: Vec<String>,
    /// Compare with no snapshot; all data is looked up in the repository
    #[arg(long, conflicts_with = "folder")]
    no_parent: bool,
    /// Time of the snapshot [default: now]
    #[arg(long, value_name = "TIME", value_parser = time::parse, conflicts_with = "folder")]
    time: Option<Timestamp>,
    /// How libvirt runs the machine
    #[arg(long, value_name = "TYPE", value_parser = ["kvm", "qemu"], default_value = "kvm")]
    domain_type: String,
    /// The libvirt network for its network cards
    #[arg(long, value_name = "NAME", default_value = "default")]
    network: String,
    /// Read the start of the archive, and show what would be made; change nothing
    #[arg(short = 'n', long)]
    dry_run: bool,
    #[command(flatten)]
    job: JobArgs,
}

impl Verb for ImportArgs {
    const EXAMPLES: &'static [Example] = &[
        Example {
            wish: "Import a XenServer export stream into the repository; the next one stores only changes",
            line: "xe vm-export vm=web1 filename= | holdfast import -r /backup/vms -",
        },
        Example {
            wish: "Import a Proxmox backup",
            line: "holdfast import -r /backup/vms vzdump-qemu-101-2026_11_23-02_00_00.vma.zst",
        },
        Example {
            wish: "Make images of it, and a configuration for libvirt",
            line: "holdfast import web1.xva.gz --to /var/lib/libvirt/images/web1",
        },
    ];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        run(self, context)
    }
}

/// Report of `import`.
#[derive(Debug, Serialize)]
struct ImportDone {
    dry_run: bool,
    #[serde(flatten)]
    what: ArchivedMachine,
    archive_bytes: u64,
    folder: Option<String>,
    snapshot: Option<SnapshotDocument>,
    /// Of a dry run: the name under which the snapshot would be listed.
    listed_as: Option<String>,
    stored_bytes: Option<u64>,
    duration_ms: u64,
}

/// A machine in an archive.
#[derive(Debug, Serialize)]
pub(crate) struct ArchivedMachine {
    archive: &'static str,
    packing: &'static str,
    machine: ImportedMachine,
    disks: Vec<ImportedDiskDocument>,
    dropped: Vec<DroppedDocument>,
}

/// The properties of a machine that all hypervisors have.
#[derive(Debug, Serialize)]
struct ImportedMachine {
    name: String,
    uuid: Option<String>,
    processor_count: u32,
    memory_bytes: u64,
    firmware: &'static str,
    network_cards: Vec<CardDocument>,
}

#[derive(Debug, Serialize)]
struct CardDocument {
    model: String,
    mac: Option<String>,
    network: Option<String>,
}

#[derive(Debug, Serialize)]
struct ImportedDiskDocument {
    name: String,
    key: String,
    label: String,
    size_bytes: u64,
    /// Whether the archive describes it as empty, and has no file for it.
    is_blank: bool,
    path: Option<String>,
}

/// A property that the target hypervisor does not support.
#[derive(Debug, Serialize)]
pub(crate) struct DroppedDocument {
    what: String,
    why: String,
}

impl From<&holdfast_hardware::Untranslated> for DroppedDocument {
    fn from(dropped: &holdfast_hardware::Untranslated) -> Self {
        Self {
            what: dropped.what.clone(),
            why: dropped.why.clone(),
        }
    }
}

impl ImportedMachine {
    fn new(machine: &holdfast_hardware::Machine) -> Self {
        use holdfast_hardware::Firmware;
        let card = |card: &holdfast_hardware::NetworkCard| CardDocument {
            model: card.model.name().to_owned(),
            mac: card.mac.clone(),
            network: card.network.clone(),
        };
        Self {
            name: machine.name.clone(),
            uuid: machine.uuid.clone(),
            processor_count: machine.processor_count,
            memory_bytes: machine.memory_bytes,
            firmware: match machine.firmware {
                Firmware::Bios => "bios",
                Firmware::Uefi => "uefi",
                Firmware::UefiSecure => "uefi-secure",
                Firmware::Paravirtual => "paravirtual",
            },
            network_cards: machine.cards.iter().map(card).collect(),
        }
    }
}

impl ImportDone {
    fn new(imported: &Imported, duration: std::time::Duration) -> Self {
        Self {
            dry_run: false,
            listed_as: None,
            what: ArchivedMachine::new(imported),
            archive_bytes: imported.read_bytes,
            folder: None,
            snapshot: None,
            stored_bytes: None,
            duration_ms: units::millis(duration),
        }
    }
}

impl ArchivedMachine {
    pub(crate) fn new(imported: &Imported) -> Self {
        let disk = |disk: &holdfast_engine::ImportedDisk| ImportedDiskDocument {
            name: disk.name.clone(),
            key: disk.key.clone(),
            label: disk.label.clone(),
            size_bytes: disk.size_bytes,
            is_blank: disk.is_blank,
            path: disk.path.as_ref().map(|path| path.display().to_string()),
        };
        Self {
            archive: imported.kind.name(),
            packing: imported.packing.name(),
            machine: ImportedMachine::new(&imported.machine),
            disks: imported.disks.iter().map(disk).collect(),
            dropped: imported.dropped.iter().map(DroppedDocument::from).collect(),
        }
    }
}

/// Lists what was dropped, as text.
pub(crate) fn list_dropped(dropped: &[DroppedDocument], page: &mut Page) {
    for dropped in dropped {
        page.line(&format!("  not carried over: {}: {}", dropped.what, dropped.why));
    }
}

impl Report for ImportDone {
    fn command(&self) -> &'static str {
        "import"
    }

    fn is_confirmation(&self) -> bool {
        !self.dry_run
    }

    fn human(&self, page: &mut Page) {
        let machine = &self.what.machine;
        if self.dry_run {
            let place = match (&self.listed_as, &self.folder) {
                (Some(name), _) => format!("as a snapshot of {name}"),
                (None, folder) => format!("into {}", folder.as_deref().unwrap_or_default()),
            };
            page.line(&format!("would import {} {place}", machine.name));
            return self.what.body(page);
        }
        let duration = std::time::Duration::from_millis(self.duration_ms);
        let size_bytes: u64 = self.what.disks.iter().map(|disk| disk.size_bytes).sum();
        let mut parts = vec![format!("{} read", units::bytes(self.archive_bytes))];
        parts.extend(self.stored_bytes.map(|bytes| format!("{} stored", units::bytes(bytes))));
        parts.push(units::duration(duration));
        parts.extend(
            units::rate(size_bytes, duration).map(|rate| format!("{} of disks", units::bytes_per_second(rate))),
        );
        let place = match (&self.snapshot, &self.folder) {
            (Some(snapshot), _) => format!("{}  snapshot {}", snapshot.machine, &snapshot.id[..8]),
            (None, folder) => format!("{}  in {}", machine.name, folder.as_deref().unwrap_or_default()),
        };
        page.line(&format!("{place}  {}", parts.join(", ")));
        self.what.body(page);
    }
}

impl ArchivedMachine {
    /// Lists the parts of the machine, as text.
    pub(crate) fn body(&self, page: &mut Page) {
        let machine = &self.machine;
        page.line(&format!(
            "  {} with {} of memory, {}, {} firmware, {}",
            self.archive,
            units::bytes(machine.memory_bytes),
            units::counted(u64::from(machine.processor_count), "processor", "processors"),
            machine.firmware,
            units::counted(machine.network_cards.len() as u64, "network card", "network cards"),
        ));
        let mut table = Table::new([
            Column::long_text("DISK"),
            Column::number("SIZE"),
            Column::long_text("IN THE ARCHIVE"),
            Column::long_text("LABEL"),
        ]);
        for disk in &self.disks {
            let name = disk.path.clone().unwrap_or_else(|| disk.name.clone());
            let key = if disk.is_blank {
                format!("{} (empty: blank disk)", disk.key)
            } else {
                disk.key.clone()
            };
            table.row([name, units::bytes(disk.size_bytes), key, disk.label.clone()]);
        }
        page.table(&table);
        list_dropped(&self.dropped, page);
    }
}

/// Reads an archive. If an image in it cannot be read sequentially and the archive is a file, the archive is read
/// again, with such images extracted to temporary files.
pub(crate) fn read_archive<T>(
    path: &Path,
    context: &Context,
    thread_count: usize,
    mut attempt: impl FnMut(Box<dyn Read + Send>, StreamImages, Job<'_>) -> holdfast_engine::Result<T>,
) -> Result<T, Error> {
    let stream = compress::input(Some(path), context)?;
    let again = path.is_file().then(|| compress::input(Some(path), context));
    let again = again.transpose()?;
    context.work(thread_count, |job| {
        match (attempt(stream, StreamImages::Streamed, job), again) {
            (Err(error), Some(again)) if wants_stored_images(&error) => {
                job.progress.note(&format!(
                    "an image of the archive cannot be read as it comes, and is kept in {} first",
                    std::env::temp_dir().display()
                ));
                attempt(again, StreamImages::Spooled, job)
            }
            (done, _) => done,
        }
    })
}

fn run(args: &ImportArgs, context: &Context) -> Result<Exit, Error> {
    let format = args.format.unwrap_or(Format::Qcow2);
    if args.compress && format != Format::Qcow2 {
        return Err(Error::usage(
            format!("images of the format {format} are not compressed"),
            "leave --compress out, or make them qcow2",
        ));
    }
    let domain = Domain {
        domain_type: args.domain_type.clone(),
        network: args.network.clone(),
    };
    match &args.folder {
        Some(folder) => into_folder(args, folder, &domain, context),
        None => into_repository(args, &domain, context),
    }
}

fn into_folder(args: &ImportArgs, folder: &Path, domain: &Domain, context: &Context) -> Result<Exit, Error> {
    let start = context.clock().now();
    let request = ImportFolder {
        folder: folder.to_owned(),
        format: args.format.unwrap_or(Format::Qcow2),
        storage: if args.compress {
            Storage::Compressed { level: None }
        } else {
            Storage::Plain
        },
    };
    if args.dry_run {
        let imported = read_archive(
            &args.archive,
            context,
            args.job.thread_count(),
            |stream, images, job| open_import(stream, images, domain.clone(), job)?.plan_into_folder(&request, job),
        )?;
        return context.report(&ImportDone {
            dry_run: true,
            folder: Some(folder.display().to_string()),
            ..ImportDone::new(&imported, context.clock().now().saturating_sub(start))
        });
    }
    let inside = folder.join("image");
    let _noted = runs::note_places([folder, &inside], context);
    let imported = read_archive(
        &args.archive,
        context,
        args.job.thread_count(),
        |stream, images, job| {
            open_import(stream, images, domain.clone(), job)?.into_folder(&request, &context.environment(), job)
        },
    )?;
    let mut done = ImportDone::new(&imported, context.clock().now().saturating_sub(start));
    done.folder = Some(folder.display().to_string());
    context.report(&done)
}

fn into_repository(args: &ImportArgs, domain: &Domain, context: &Context) -> Result<Exit, Error> {
    let start = context.clock().now();
    let repository = context.open_repository()?;
    let request = ImportRepository {
        machine: args.machine.clone(),
        snapshot: SnapshotOptions {
            parent: if args.no_parent {
                ParentChoice::None
            } else {
                ParentChoice::Newest
            },
            continuation: crate::args::Switch::continuation(args.same_machine),
            tags: args.tags.clone(),
            host: SystemProcesses.this().host,
            program: crate::PROGRAM.to_owned(),
            zone: context.zone().clone(),
        },
        time: args.time.unwrap_or_else(time::now),
    };
    if args.dry_run {
        let (imported, name) = read_archive(
            &args.archive,
            context,
            args.job.thread_count(),
            |stream, images, job| {
                let archive = open_import(stream, images, domain.clone(), job)?;
                archive.plan_into_repository(&repository, request.clone(), job)
            },
        )?;
        return context.report(&ImportDone {
            dry_run: true,
            listed_as: Some(name.to_string()),
            ..ImportDone::new(&imported, context.clock().now().saturating_sub(start))
        });
    }
    let report = read_archive(
        &args.archive,
        context,
        args.job.thread_count(),
        |stream, images, job| {
            open_import(stream, images, domain.clone(), job)?.into_repository(&repository, request.clone(), job)
        },
    )?;
    let mut done = ImportDone::new(&report.imported, context.clock().now().saturating_sub(start));
    done.stored_bytes = Some(report.backup.stored_bytes);
    done.snapshot = Some(SnapshotDocument::from(&report.backup.snapshot));
    context.report(&done)
}
