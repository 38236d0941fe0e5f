//! Finds a point in time of a machine: host snapshots of all its disks, and its state.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::{Duration, UNIX_EPOCH};

use holdfast_block::BlockDevice as _;
use holdfast_host::Description;
use holdfast_host::provider::{Dataset, HostSnapshot, HostSnapshotName, View};
use holdfast_image::Format;
use holdfast_repo::{DiskRecord, Manifest};

use super::contents::{HostContents, HostDisk};
use crate::host_snapshot::compare_images::{below, options_in_view};
use crate::host_snapshot::states::{KeptDisk, KeptState, StateStore};
use crate::host_snapshot::{HostSnapshotRecord, MachinePlaces, Providers, SetCompleteness, SetState};
use crate::image::source::OpenSource;
use crate::job::error::Refusal;
use crate::job::{Error, Job, Result};
use crate::notes::{NOTE_FORMAT, NOTE_PATH, NOTE_UUID};
use crate::restore::machine::{MachineRestorePlan, chain_of};

/// Which host snapshots.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PointName {
    /// Those of this name.
    Named(String),
    /// The newest that all disks have.
    Latest,
}

/// A requested point in time.
pub struct HostPointRequest<'a> {
    /// The providers of this host.
    pub providers: &'a Providers,
    /// Where the states of machines are stored.
    pub states: &'a StateStore,
    /// Name of the machine.
    pub machine: &'a str,
    /// The present machine; none if it no longer exists.
    pub present: Option<(&'a Description, &'a MachinePlaces)>,
    /// Which point.
    pub name: PointName,
    /// A random number that names the temporary views of the snapshots.
    pub run: u32,
}

/// An open point in time of a machine.
pub struct HostPoint {
    /// The name of its host snapshots.
    pub name: String,
    /// The host snapshots with its disks.
    pub snapshots: Vec<HostSnapshotName>,
    /// Whether its configuration and other state beside the disks is stored.
    pub has_state: bool,
    /// Its UUID at its hypervisor.
    pub uuid: String,
    pub(super) manifest: Manifest,
    // Closed before the views are removed.
    pub(super) contents: HostContents,
    warnings: Vec<String>,
    /// A random number that names the temporary views of the snapshots.
    pub(super) run: u32,
    _views: Vec<View>,
}

impl HostPoint {
    /// The description of the point, in the form of a snapshot in a repository.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Adds the warnings about the point to a plan.
    pub(super) fn with_warnings(&self, mut plan: MachineRestorePlan) -> MachineRestorePlan {
        plan.warnings.extend(self.warnings.iter().cloned());
        plan
    }
}

/// Finds and opens a point in time.
///
/// # Errors
/// A disk has no host snapshot of that name, or is not in it.
pub fn open_host_point(request: &HostPointRequest<'_>, job: Job<'_>) -> Result<HostPoint> {
    let states = states_of(request, job)?;
    let today = request
        .present
        .map(|(description, places)| KeptDisk::all_of(description, places))
        .unwrap_or_default();
    let mut seen = SnapshotLists::default();
    let (name, state) = seen.find(request, &states, &today)?;
    let disks = state.map_or(&today, |state| &state.disks);
    let snapshots = seen.of_disks(request, disks, &name)?;
    let mut warnings = Vec::new();
    match SetCompleteness::new(request.providers).together(&snapshots.values().collect::<Vec<_>>()) {
        SetState::Yes => {}
        SetState::Unknown(why) => warnings.push(format!(
            "of the host snapshots called {name}: {why}; the disks of {} may not go together",
            request.machine
        )),
        SetState::No(why) => return Err(refusal(request, &name, why, Vec::new()).into()),
    }
    let mut views = Vec::new();
    let mut contents = HostContents::default();
    let mut roots: BTreeMap<&Dataset, PathBuf> = BTreeMap::new();
    for (number, (dataset, snapshot)) in snapshots.iter().enumerate() {
        let label = format!("{:08x}-{number}", request.run);
        let view = request.providers.of_dataset(dataset).view(&snapshot.name, &label)?;
        roots.insert(dataset, view.path().to_owned());
        views.push(view);
    }
    for kept in disks {
        let dataset = &kept.place.dataset;
        let (snapshot, root) = (&snapshots[dataset], roots[dataset].clone());
        let disk = open_disk(request, kept, snapshot, root)?;
        contents.disks.insert(kept.target.clone(), disk);
    }
    let newest = snapshots.values().max_by_key(|snapshot| snapshot.time_s);
    let time_ms = newest.map_or(0, |snapshot| snapshot.time_s.saturating_mul(1000));
    let uuid = match (state, request.present) {
        (_, Some((description, _))) => description.summary.uuid.clone(),
        (Some(state), None) => state.uuid().to_owned(),
        (None, None) => String::new(),
    };
    let mut manifest = match state {
        Some(state) => state.manifest.clone(),
        None => Manifest::external(request.machine.to_owned(), time_ms),
    };
    manifest.notes.entry(NOTE_UUID.to_owned()).or_insert(uuid.clone());
    manifest.disks.extend(contents.disks.values().map(record_of));
    Ok(HostPoint {
        name,
        snapshots: snapshots.into_values().map(|snapshot| snapshot.name).collect(),
        has_state: state.is_some(),
        uuid,
        manifest,
        contents,
        warnings,
        run: request.run,
        _views: views,
    })
}

fn refusal(request: &HostPointRequest<'_>, name: &str, reason: String, present: Vec<String>) -> Refusal {
    Refusal::NoPoint {
        machine: request.machine.to_owned(),
        name: name.to_owned(),
        reason,
        present,
    }
}

/// The stored states of the machine.
fn states_of(request: &HostPointRequest<'_>, job: Job<'_>) -> Result<Vec<KeptState>> {
    let mut states = request.states.states(job)?;
    let uuid = request.present.map(|(description, _)| &description.summary.uuid);
    states.retain(|state| match uuid {
        Some(uuid) => state.uuid() == uuid,
        None => state.manifest.machine == request.machine,
    });
    Ok(states)
}

fn record_of(disk: &HostDisk) -> DiskRecord {
    let mut notes = BTreeMap::from([(NOTE_PATH.to_owned(), disk.kept.file.display().to_string())]);
    if let Some(format) = &disk.kept.format {
        notes.insert(NOTE_FORMAT.to_owned(), format.clone());
    }
    DiskRecord::external(disk.kept.target.clone(), disk.source.device.size_bytes(), notes)
}

fn set_of(snapshot: &HostSnapshot) -> Option<crate::SetId> {
    HostSnapshotRecord::parse(snapshot.record.as_deref()?)?.set
}

/// The host snapshots of datasets; each dataset is queried once.
#[derive(Default)]
struct SnapshotLists {
    of: BTreeMap<Dataset, Vec<HostSnapshot>>,
}

impl SnapshotLists {
    fn of(&mut self, request: &HostPointRequest<'_>, dataset: &Dataset) -> Result<&[HostSnapshot]> {
        if !self.of.contains_key(dataset) {
            let found = request.providers.of_dataset(dataset).snapshots(&dataset.name)?;
            self.of.insert(dataset.clone(), found);
        }
        Ok(&self.of[dataset])
    }

    /// The name of the point, and its state: the one of the same set.
    fn find<'s>(
        &mut self,
        request: &HostPointRequest<'_>,
        states: &'s [KeptState],
        today: &[KeptDisk],
    ) -> Result<(String, Option<&'s KeptState>)> {
        let name = match &request.name {
            PointName::Named(name) => name.clone(),
            PointName::Latest => self.latest(request, today)?,
        };
        let mut found: Option<&KeptState> = None;
        for state in states.iter().rev() {
            let mut of_it = state.snapshots.iter().filter(|snapshot| snapshot.name == name);
            let Some(first) = of_it.next() else { continue };
            // Another snapshot may have the name now.
            let there = self.of(request, &first.dataset).unwrap_or_default();
            let is_of_set = |snapshot: &HostSnapshot| snapshot.name == *first && set_of(snapshot) == Some(state.set);
            if !there.iter().any(is_of_set) {
                continue;
            }
            match found {
                None => found = Some(state),
                Some(newer) if newer.uuid() != state.uuid() => {
                    let reason = format!(
                        "several machines of this name have one: UUID {} and UUID {}",
                        newer.uuid(),
                        state.uuid()
                    );
                    return Err(refusal(request, &name, reason, Vec::new()).into());
                }
                Some(_) => {}
            }
        }
        if found.is_some() {
            return Ok((name, found));
        }
        if request.present.is_none() {
            let reason = "the machine is not there, and no configuration of it is kept with such a host snapshot";
            let present = names(states.iter().flat_map(|state| &state.snapshots));
            return Err(refusal(request, &name, reason.to_owned(), present).into());
        }
        Ok((name, None))
    }

    /// The newest name that the datasets of all disks have, whose host snapshots can be of one point in time.
    fn latest(&mut self, request: &HostPointRequest<'_>, disks: &[KeptDisk]) -> Result<String> {
        let datasets: BTreeSet<&Dataset> = disks.iter().map(|disk| &disk.place.dataset).collect();
        for dataset in &datasets {
            self.of(request, dataset)?;
        }
        let of_name = |dataset: &Dataset, name: &str| {
            let mut there = self.of[dataset].iter();
            there.find(|snapshot| snapshot.name.name == name)
        };
        let first = datasets.first().map(|first| &self.of[*first][..]);
        let mut common: Vec<Vec<&HostSnapshot>> = first
            .unwrap_or_default()
            .iter()
            .filter_map(|one| {
                let of_all = datasets.iter().map(|dataset| of_name(dataset, &one.name.name));
                of_all.collect()
            })
            .collect();
        common.sort_by_key(|of_all| of_all.last().map(|snapshot| snapshot.time_s));
        let mut completeness = SetCompleteness::new(request.providers);
        let newest = common
            .iter()
            .rev()
            .find(|of_all| !matches!(completeness.together(of_all), SetState::No(_)));
        let name = newest.and_then(|of_all| Some(of_all.first()?.name.name.clone()));
        Ok(name.ok_or_else(|| {
            let reason = "there is no host snapshot that all its disks have";
            refusal(request, "latest", reason.to_owned(), Vec::new())
        })?)
    }

    /// The snapshots of this name for the datasets of all disks.
    fn of_disks(
        &mut self,
        request: &HostPointRequest<'_>,
        disks: &[KeptDisk],
        name: &str,
    ) -> Result<BTreeMap<Dataset, HostSnapshot>> {
        let refuse = |reason: String, present: Vec<String>| refusal(request, name, reason, present);
        if disks.is_empty() {
            return Err(refuse(
                "none of its disks is where host snapshots are made".to_owned(),
                Vec::new(),
            )
            .into());
        }
        let mut snapshots = BTreeMap::new();
        for disk in disks {
            let dataset = &disk.place.dataset;
            let there = self.of(request, dataset)?;
            let found = there.iter().find(|snapshot| snapshot.name.name == name);
            let found = found.ok_or_else(|| {
                let reason = format!("{dataset}, where its disk {} is, has none of that name", disk.target);
                refuse(reason, names(there.iter().map(|snapshot| &snapshot.name)))
            })?;
            snapshots.insert(dataset.clone(), found.clone());
        }
        Ok(snapshots)
    }
}

/// The newest names, without duplicates.
fn names<'n>(snapshots: impl Iterator<Item = &'n HostSnapshotName>) -> Vec<String> {
    const COUNT: usize = 5;
    let mut names: Vec<String> = Vec::new();
    for snapshot in snapshots {
        names.retain(|name| *name != snapshot.name);
        names.push(snapshot.name.clone());
    }
    names.into_iter().rev().take(COUNT).collect()
}

/// Opens a disk in the view of its snapshot.
fn open_disk(
    request: &HostPointRequest<'_>,
    kept: &KeptDisk,
    snapshot: &HostSnapshot,
    root: PathBuf,
) -> Result<HostDisk> {
    let dataset = &kept.place.dataset;
    let state = request.providers.of_dataset(dataset).dataset(&dataset.name)?;
    let is_volume = kept.place.path.as_os_str().is_empty();
    let path = below(&root, &kept.place.path);
    let refuse = |reason: String| refusal(request, &snapshot.name.name, reason, Vec::new());
    if !path.exists() {
        let reason = format!("the image of disk {} is not in {}", kept.target, snapshot.name);
        return Err(refuse(reason).into());
    }
    let format = Format::from_name(kept.format.as_deref().unwrap_or("raw")).ok_or_else(|| Error::TargetFormat {
        path: path.clone(),
        format: kept.format.clone().unwrap_or_default(),
    })?;
    let present_root = state.folder.filter(|_| !is_volume);
    let mut options = options_in_view(Some(format), &root, present_root.as_deref());
    let today = chain_of(&kept.file, kept.format.as_deref()).into_iter();
    options.allow.extend(today.filter(|path| path.exists()));
    let source = OpenSource::open_with(&path, &options).map_err(|error| error.on(&path))?;
    for layer in source.paths().skip(1).filter(|layer| !layer.starts_with(&root)) {
        if is_newer(layer, snapshot.time_s) {
            let reason = format!(
                "the image of disk {} is based on {}, which is not in the host snapshot, and was written to since",
                kept.target,
                layer.display()
            );
            return Err(refuse(reason).into());
        }
    }
    Ok(HostDisk {
        is_based: source.paths().count() > 1,
        kept: kept.clone(),
        snapshot: snapshot.name.clone(),
        source,
        path,
        root,
        present_root,
        cloned: None,
    })
}

/// Whether a file was modified after a point in time; also true if that is unknown.
fn is_newer(path: &Path, time_s: i64) -> bool {
    let then = UNIX_EPOCH + Duration::from_secs(u64::try_from(time_s).unwrap_or_default() + 1);
    let written = path.metadata().and_then(|metadata| metadata.modified());
    written.map_or(true, |written| written > then)
}
