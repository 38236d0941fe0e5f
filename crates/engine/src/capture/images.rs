//! `backup` of images.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::PathBuf;

use holdfast_host::is_locked_by_others;
use holdfast_image::{Format, USUAL_SECTOR_BYTES};
use holdfast_repo::{Manifest, Parent, Repository, Source, SourceData};
use jiff::Timestamp;

use super::plan::{BackupPlan, PlannedMethod, PlannedRead};
use super::sink::{RepositorySink, SnapshotSink as _};
use super::snapshot::{BackupReport, SnapshotOptions, choose_parent};
use crate::image::source::{DiskOrigin, OpenSource, SourceName, disk_names};
use crate::job::bottleneck::Stages;
use crate::job::priority::BulkPriority;
use crate::job::read_meter::{Meter, MeteredDevice, MeteredStream};
use crate::job::{Counting, Error, Job, MachineName, Progress, Result, Unit};
use crate::notes::{NOTE_FORMAT, NOTE_PATH, NOTE_SECTOR_BYTES};
use crate::repository::calendar::Calendar;
use crate::repository::calendar::time_of;
use crate::repository::name_conflict::{Claimant, NameClaim};
use crate::repository::open::snapshots;

/// What to back up.
pub struct BackupRequest<'a> {
    /// The disks of one machine.
    pub sources: Vec<SourceName>,
    /// The machine's name; by default that of the first file.
    pub machine: Option<MachineName>,
    /// The format of all images; by default it is detected from their content.
    pub format: Option<Format>,
    /// Files outside the images' folders that may be base images.
    pub allowed: Vec<PathBuf>,
    /// How the snapshot is made.
    pub snapshot: SnapshotOptions,
    /// The point in time of the images.
    pub time: Timestamp,
    /// Standard input.
    pub stdin: &'a mut dyn Read,
}

/// Backs up disks of one machine as one snapshot.
///
/// A source that changes or shrinks while it is read causes a warning: the snapshot is created, but may be
/// inconsistent.
pub fn backup(repository: &Repository, request: BackupRequest<'_>, job: Job<'_>) -> Result<BackupReport> {
    let machine = machine_name(&request)?;
    let manifests = snapshots(repository, job.progress)?;
    let claim = NameClaim {
        name: machine.as_str(),
        claimant: Claimant::Images,
        continuation: request.snapshot.continuation,
    };
    let calendar = Calendar::new(repository, &request.snapshot.zone, job.progress);
    let granted = claim.check(&manifests, calendar, job.progress)?;
    let listing = ImageListing {
        machine: machine.to_string(),
        parent: choose_parent(&request.snapshot.parent, calendar, &manifests, &granted)?,
        notes: granted.note.into_iter().collect(),
    };
    store_disks(repository, request, listing, job)
}

/// Plans what [`backup`] would do. Nothing is read from standard input, and nothing is changed.
pub fn plan_backup(repository: &Repository, request: &BackupRequest<'_>, job: Job<'_>) -> Result<BackupPlan> {
    let name = machine_name(request)?;
    let sink = RepositorySink::new(repository, request.snapshot.clone(), job);
    sink.begin(&name, Claimant::Images)?;
    let parent = sink.history().and_then(|history| history.parent.cloned());
    let names = disk_names(&request.sources, job.progress)?;
    let opened = open_sources(request, &names, parent.as_ref(), job.progress)?;
    let disks = names.into_iter().zip(&opened).map(|(name, source)| {
        let size_bytes = source.as_ref().map(|source| source.device.size_bytes());
        let read_bytes = source.as_ref().map(OpenSource::allocated_bytes).transpose()?;
        Ok(PlannedRead {
            name,
            size_bytes,
            read_bytes,
            reason: Some("images have no record of changes".to_owned()),
        })
    });
    Ok(BackupPlan {
        disks: disks.collect::<Result<_>>()?,
        name,
        state: None,
        parent,
        method: PlannedMethod {
            word: "images",
            reason: "images were named".to_owned(),
        },
        left_out: Vec::new(),
    })
}

/// How a snapshot of disks is listed.
pub(crate) struct ImageListing<'m> {
    /// The name that the snapshot is listed under.
    pub(crate) machine: String,
    /// Notes for the snapshot.
    pub(crate) notes: BTreeMap<String, String>,
    /// The snapshot to compare with.
    pub(crate) parent: Option<&'m Manifest>,
}

/// Stores disks as one snapshot with the given listing, which overrides the request's.
pub(crate) fn store_disks(
    repository: &Repository,
    request: BackupRequest<'_>,
    listing: ImageListing<'_>,
    job: Job<'_>,
) -> Result<BackupReport> {
    let start = job.clock.now();
    let ImageListing { machine, notes, parent } = listing;
    let names = disk_names(&request.sources, job.progress)?;
    let opened = open_sources(&request, &names, parent, job.progress)?;
    if let Some(parent) = parent {
        warn_of_other_origins(&opened, &names, parent, &request.snapshot.host, job.progress);
    }
    job.interrupt.check()?;

    report_total(&opened, &machine, job)?;
    let stages = Stages::new(job.clock, job.progress);
    let meters: Vec<Meter> = opened.iter().map(|_| Meter::new()).collect();
    let devices: Vec<Option<MeteredDevice<'_>>> = opened
        .iter()
        .zip(&meters)
        .map(|(source, meter)| source.as_ref().map(|source| metered(source, meter, job, &stages)))
        .collect();
    let mut stdin = Some(request.stdin);
    let mut streams: Vec<Option<MeteredStream<'_>>> = opened
        .iter()
        .zip(&meters)
        .map(|(source, meter)| match source {
            Some(_) => None,
            None => stdin.take().map(|inner| MeteredStream {
                inner,
                meter,
                progress: job.progress,
                stages: &stages,
                interrupt: job.interrupt,
            }),
        })
        .collect();
    let sources = named_sources(&names, &opened, &devices, &mut streams)?;
    let _bulk = BulkPriority::begin();
    let stored = repository.backup(
        holdfast_repo::BackupRequest {
            machine,
            time_ms: request.time.as_millisecond(),
            tags: request.snapshot.tags,
            parent: parent.map_or(Parent::None, |parent| Parent::Named(parent.id)),
            host: request.snapshot.host,
            program: request.snapshot.program,
            notes,
            sources,
            thread_count: job.thread_count,
        },
        &job.watch_stages(Counting::Elsewhere, &stages),
    );
    let report = stored.map_err(|error| interrupted_or(error, job))?;
    for ((name, source), meter) in names.iter().zip(&opened).zip(&meters) {
        warn_of_changes(name, source.as_ref(), meter, job.progress)?;
    }
    Ok(BackupReport {
        snapshot: report.snapshot,
        stored_bytes: report.stored_bytes,
        bottleneck: stages.bottleneck(),
        duration: job.clock.now().saturating_sub(start),
    })
}

fn named_sources<'a>(
    names: &[String],
    opened: &[Option<OpenSource>],
    devices: &'a [Option<MeteredDevice<'a>>],
    streams: &'a mut [Option<MeteredStream<'_>>],
) -> Result<Vec<Source<'a>>> {
    let mut sources = Vec::new();
    for (((name, source), device), stream) in names.iter().zip(opened).zip(devices).zip(streams) {
        let data = match (device, stream) {
            (Some(device), _) => SourceData::Disk(device),
            (None, Some(stream)) => SourceData::Stream(stream),
            (None, None) => return Err(Error::StandardInputTwice),
        };
        let (name, notes) = (name.clone(), source.as_ref().map(notes_of).unwrap_or_default());
        sources.push(Source { name, data, notes });
    }
    Ok(sources)
}

/// The reason why a backup failed: a stream reports an interruption as an error of its own.
fn interrupted_or(error: holdfast_repo::Error, job: Job<'_>) -> Error {
    job.interrupt.check().err().map_or_else(|| error.into(), Error::from)
}

fn machine_name(request: &BackupRequest<'_>) -> Result<MachineName> {
    if let Some(machine) = &request.machine {
        return Ok(machine.clone());
    }
    let base = request.sources.iter().find_map(SourceName::base_name);
    Ok(MachineName::new(base.ok_or(Error::NoMachineName)?)?)
}

/// Opens every source; none stands for standard input.
fn open_sources(
    request: &BackupRequest<'_>,
    names: &[String],
    parent: Option<&Manifest>,
    progress: &dyn Progress,
) -> Result<Vec<Option<OpenSource>>> {
    let mut opened = Vec::new();
    for (source, name) in request.sources.iter().zip(names) {
        let DiskOrigin::Path(path) = &source.origin else {
            opened.push(None);
            continue;
        };
        let image = OpenSource::open(path, request.format, &request.allowed)?;
        let before = parent
            .and_then(|parent| parent.disk(Some(name)).ok())
            .and_then(|disk| disk.notes.get(NOTE_FORMAT));
        image.warn_of_format(before.map(String::as_str), progress);
        if is_locked_by_others(path) {
            progress.warning(&format!(
                "{} is in use, as by a machine that runs: what is read may be of several moments; a backup of the machine is of one",
                path.display()
            ));
        } else {
            image.warn_of_inconsistencies(progress)?;
        }
        if request.format.is_none()
            && image.format != Format::Raw
            && let Some(before) = before.filter(|before| *before == Format::Raw.name())
        {
            return Err(Error::FormatChanged {
                path: path.clone(),
                before: before.clone(),
                now: image.format.to_string(),
            });
        }
        opened.push(Some(image));
    }
    if opened.iter().filter(|source| source.is_none()).count() > 1 {
        return Err(Error::StandardInputTwice);
    }
    Ok(opened)
}

/// Warns if the name has snapshots of other images: two machines whose images have the same name would be mixed.
fn warn_of_other_origins(
    opened: &[Option<OpenSource>],
    names: &[String],
    parent: &Manifest,
    host: &str,
    progress: &dyn Progress,
) {
    for (name, source) in names.iter().zip(opened) {
        let Ok(before) = parent.disk(Some(name)) else { continue };
        let (Some(source), Some(path)) = (source, before.notes.get(NOTE_PATH)) else {
            continue;
        };
        let now = source.canonical.display().to_string();
        if *path != now || parent.host != host {
            progress.warning(&format!(
                "disk {name} of {machine} is {now} on {host}; in the snapshot before ({id}, {time}) it was {path} on \
                 {old_host}: if these are two machines, use --machine",
                machine = parent.machine,
                id = parent.id.short(),
                time = time_of(parent),
                old_host = parent.host,
            ));
        }
    }
}

/// Reports how many bytes there are to read, if that is known.
fn report_total(opened: &[Option<OpenSource>], machine: &str, job: Job<'_>) -> Result<()> {
    job.progress.phase(&format!("backing up {machine}"), Unit::Bytes);
    let mut total = 0;
    for source in opened {
        job.interrupt.check()?;
        match source {
            Some(source) => total += source.allocated_bytes()?,
            None => return Ok(()),
        }
    }
    job.progress.total(total);
    Ok(())
}

fn metered<'a>(source: &'a OpenSource, meter: &'a Meter, job: Job<'a>, stages: &'a Stages<'a>) -> MeteredDevice<'a> {
    MeteredDevice {
        inner: &*source.device,
        meter,
        progress: job.progress,
        stages,
    }
}

fn notes_of(source: &OpenSource) -> BTreeMap<String, String> {
    let mut notes = BTreeMap::from([
        (NOTE_PATH.to_owned(), source.canonical.display().to_string()),
        (NOTE_FORMAT.to_owned(), source.format.to_string()),
    ]);
    if source.sector_bytes != USUAL_SECTOR_BYTES {
        notes.insert(NOTE_SECTOR_BYTES.to_owned(), source.sector_bytes.to_string());
    }
    notes
}

fn warn_of_changes(name: &str, source: Option<&OpenSource>, meter: &Meter, progress: &dyn Progress) -> Result<()> {
    if let Some(end) = meter.shrunk_to() {
        progress.warning(&format!(
            "disk {name} shrank to {end} bytes while it was read: the rest of it is zero in the snapshot"
        ));
    }
    for (path, change) in source.map(OpenSource::changes).transpose()?.unwrap_or_default() {
        progress.warning(&format!(
            "{} changed while it was read ({change}): disk {name} of the snapshot is not of one instant",
            path.display()
        ));
    }
    Ok(())
}
