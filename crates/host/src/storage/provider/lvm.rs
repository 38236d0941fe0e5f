//! LVM: volumes in thin pools, by its own programs.
//!
//! A host snapshot is a read-only thin snapshot, which is activated only while it is read. Its tags, which are set at
//! its creation, identify it and contain Holdfast's record. LVM has no type for snapshots: a read-only thin volume
//! with an origin counts as a snapshot, whichever program created it. So does a writable volume of another program
//! while it is inactive.
//!
//! A snapshot does not depend on its origin: it is kept when the origin is removed, and is found by the origin's
//! name.
//!
//! Source: lvmthin(7), lvcreate(8), lvmreport(7); lvm2 2.03.16.

mod changes;
mod device;
mod names;
mod pool;
mod report;
mod view;
mod volumes;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use holdfast_block::Clock;

use super::folder::check_name;
use super::lvm::report::LVS;
use super::{
    Dataset, DatasetState, HostSnapshot, HostSnapshotLabel, HostSnapshotName, HostSnapshotScope, NotedSnapshot,
    Provider, ProviderError, ProviderKind, ProviderResult, View,
};
use crate::system::process::{ToolError, Tools};
pub(super) use device::{Found, find as find_device};
use error_messages::refusal;
use names::{HELD, hold_tag, record_tags, tags_of, volume_name};
use report::{FIELDS, Volume, VolumeKind, parse};
#[cfg(feature = "hostile")]
pub(crate) use volumes::{SPECIMEN, parse_volumes};
use volumes::{Snapshot, Volumes, dataset, found, names_of, unknown};

const LVCREATE: &str = "lvcreate";
const LVCHANGE: &str = "lvchange";
const LVREMOVE: &str = "lvremove";
/// Number of attempts for actions that udev, or a process that scans new devices, may block for a moment.
const ATTEMPT_COUNT: u32 = 40;
const ATTEMPT_INTERVAL: Duration = Duration::from_millis(50);

/// LVM on this host.
pub struct Lvm {
    tools: Arc<dyn Tools>,
    /// The folder of the locks for viewing a snapshot, and for reading the metadata of a pool.
    locks: PathBuf,
    clock: Arc<dyn Clock>,
    /// The UUIDs of prepared volumes, by their full names, so that they need not be queried while machines are
    /// paused.
    prepared: Mutex<BTreeMap<String, String>>,
}

impl Lvm {
    /// Uses LVM through `tools`. Locks are in the folder `locks`, which must be the same for all processes of this
    /// host.
    pub fn new(tools: Arc<dyn Tools>, locks: PathBuf, clock: Arc<dyn Clock>) -> Self {
        Self {
            tools,
            locks,
            clock,
            prepared: Mutex::default(),
        }
    }

    /// Runs a command. A refusal becomes an error with the action and its object.
    fn ask(&self, action: &'static str, what: &str, program: &str, arguments: &[&str]) -> ProviderResult<String> {
        let answer = self.tools.ask(program, arguments)?;
        if answer.is_success {
            return Ok(answer.output);
        }
        Err(refusal(action, what, &answer.stderr))
    }

    /// The volumes of a group, or of all groups.
    fn volumes(&self, group: Option<&str>) -> ProviderResult<Volumes> {
        let mut arguments = FIELDS.to_vec();
        arguments.extend(group);
        parse(&self.ask("inspect", group.unwrap_or("all volumes"), LVS, &arguments)?).map(Volumes)
    }

    fn volumes_of(&self, dataset: &str) -> ProviderResult<Volumes> {
        self.volumes(Some(names_of(dataset)?.0))
    }

    /// Whether there is a volume group of this name.
    pub fn has_group(&self, name: &str) -> bool {
        names::is_name(name) && self.volumes(Some(name)).is_ok()
    }

    /// Removes a volume if it is still the inspected volume and has no holds.
    fn remove(&self, volume: &Volume, shown: &str) -> ProviderResult<()> {
        // LVM evaluates the selection while it has locked the group.
        let selection = format!("lv_uuid=\"{}\" && lv_tags!={{\"{HELD}\"}}", volume.uuid);
        let full = volume.full_name();
        self.ask(
            "remove",
            shown,
            LVREMOVE,
            &["-qq", "--yes", "--force", "--select", &selection, &full],
        )?;
        let left = self.volumes(Some(&volume.group));
        match left {
            // The volume was the last of its group, or another volume has its name now.
            Ok(left) if left.0.iter().all(|one| one.uuid != volume.uuid) => Ok(()),
            Ok(_) => Err(ProviderError::Held {
                what: shown.to_owned(),
                reason: "by a new hold".to_owned(),
            }),
            Err(error) => Err(error),
        }
    }

    /// Removes a volume that was [cloned](Provider::clone_to) from a host snapshot.
    pub fn destroy_clone(&self, name: &str, of: &HostSnapshotName) -> ProviderResult<()> {
        let (group, own) = names_of(name)?;
        let volumes = self.volumes(Some(group))?;
        let not_there = || ProviderError::NotFound { what: name.to_owned() };
        let volume = volumes.named(group, own).ok_or_else(not_there)?;
        let snapshot = volumes.snapshot(of)?;
        if volume.origin != snapshot.volume.name || volume.is_read_only {
            return Err(ProviderError::Refused {
                action: "remove",
                what: name.to_owned(),
                reason: format!("it is not a clone of {of}"),
            });
        }
        self.remove(volume, name)
    }

    /// Removes the leftovers of a failed creation, and resumes a suspended volume.
    fn clean_up_after(&self, one: &HostSnapshotScope, label: &HostSnapshotLabel<'_>, error: &ProviderError) {
        if matches!(error, ProviderError::Tool(ToolError::TimedOut { .. })) {
            // A killed program may have left the volume suspended. This call resumes it.
            drop(self.tools.ask(LVCHANGE, &["-qq", "--refresh", &one.dataset.name]));
        }
        let snapshot = HostSnapshotName {
            dataset: one.dataset.clone(),
            name: label.name.to_owned(),
        };
        let Ok(volumes) = self.volumes_of(&one.dataset.name) else {
            return;
        };
        if let Ok(found) = volumes.snapshot(&snapshot)
            && found.volume.tags.record().as_deref() == Some(label.record)
        {
            drop(self.remove(found.volume, &snapshot.to_string()));
        }
    }

    fn prepared_uuid(&self, of: &Dataset) -> ProviderResult<String> {
        let prepared = self.prepared.lock().unwrap_or_else(PoisonError::into_inner);
        prepared.get(&of.name).cloned().ok_or_else(|| ProviderError::Refused {
            action: "make a snapshot of",
            what: of.to_string(),
            reason: "it was not prepared".to_owned(),
        })
    }

    fn make(&self, one: &HostSnapshotScope, label: &HostSnapshotLabel<'_>) -> ProviderResult<()> {
        let (group, origin) = names_of(&one.dataset.name)?;
        check_name(label.name)?;
        let uuid = self.prepared_uuid(&one.dataset)?;
        let shown = format!("{}@{}", one.dataset, label.name);
        let name = volume_name(group, origin, label.name);
        let tags = tags_of(label.name, &uuid, origin);
        let records = record_tags(label.record).ok_or_else(|| too_long(&shown))?;
        let mut arguments = vec![
            "-qq",
            "--yes",
            "--snapshot",
            "--permission",
            "r",
            "--setactivationskip",
            "y",
        ];
        for tag in tags.iter().chain(&records) {
            arguments.extend(["--addtag", tag]);
        }
        arguments.extend(["--name", &name, &one.dataset.name]);
        self.ask("create", &shown, LVCREATE, &arguments).map(drop)
    }
}

fn too_long(what: &str) -> ProviderError {
    ProviderError::Refused {
        action: "write",
        what: format!("the record of {what}"),
        reason: "it does not fit into its tags".to_owned(),
    }
}

impl Provider for Lvm {
    fn kind(&self) -> ProviderKind {
        ProviderKind::Lvm
    }

    fn datasets(&self) -> ProviderResult<Vec<DatasetState>> {
        let volumes = self.volumes(None)?;
        let mut states: Vec<DatasetState> = Vec::new();
        for volume in volumes.0.iter().filter(|one| one.kind == VolumeKind::Thin) {
            states.push(match volumes.as_snapshot(volume) {
                None => volumes.state(volume),
                // The origin may have been removed.
                Some(snapshot) if volumes.named(&volume.group, snapshot.of).is_none() => {
                    unknown(&volume.group, snapshot.of)
                }
                Some(_) => continue,
            });
        }
        states.sort_by(|a, b| a.dataset.cmp(&b.dataset));
        states.dedup_by(|a, b| a.dataset == b.dataset);
        Ok(states)
    }

    fn dataset(&self, name: &str) -> ProviderResult<DatasetState> {
        let (group, own) = names_of(name)?;
        let volumes = self.volumes(Some(group))?;
        match volumes.named(group, own) {
            Some(volume) if volume.kind == VolumeKind::Thin => Ok(volumes.state(volume)),
            Some(volume) => Err(pool::not_thin(volume)),
            None if volumes.snapshots_of(group, own).next().is_some() => Ok(unknown(group, own)),
            None => Err(ProviderError::NotFound {
                what: dataset(group, own).to_string(),
            }),
        }
    }

    fn snapshots(&self, name: &str) -> ProviderResult<Vec<HostSnapshot>> {
        let (group, own) = names_of(name)?;
        let volumes = self.volumes(Some(group))?;
        let of = dataset(group, own);
        let mut all: Vec<Snapshot<'_>> = volumes.snapshots_of(group, own).collect();
        if all.is_empty() && volumes.named(group, own).is_none() {
            return Err(ProviderError::NotFound { what: of.to_string() });
        }
        // Snapshots of the same second are ordered by their thin ids.
        all.sort_by_key(|one| (one.volume.time_s, one.volume.thin_id));
        Ok(all.iter().map(|one| found(one, &of)).collect())
    }

    fn noted(&self, name: &str) -> ProviderResult<Vec<NotedSnapshot>> {
        let noted = self.snapshots(name)?.into_iter();
        let ours = noted.filter(|one| one.record.is_some());
        Ok(ours
            .map(|one| NotedSnapshot::new(one.name.dataset, one.name.name, one.record))
            .collect())
    }

    fn measure(&self, snapshots: &mut [HostSnapshot]) -> ProviderResult<()> {
        self.measure_by_metadata(snapshots)
    }

    fn groups(&self, wanted: &[HostSnapshotScope]) -> ProviderResult<Vec<Vec<HostSnapshotScope>>> {
        Ok(wanted.iter().map(|one| vec![one.clone()]).collect())
    }

    fn prepare(&self, wanted: &[HostSnapshotScope], label: &HostSnapshotLabel<'_>) -> ProviderResult<()> {
        for one in wanted {
            check_name(label.name)?;
            let (group, own) = names_of(&one.dataset.name)?;
            if one.is_tree {
                return Err(ProviderError::Refused {
                    action: "make a snapshot of",
                    what: format!("{} and all below it", one.dataset),
                    reason: "a volume of LVM has no descendants".to_owned(),
                });
            }
            let volumes = self.volumes(Some(group))?;
            let not_there = || ProviderError::NotFound {
                what: one.dataset.to_string(),
            };
            let volume = volumes.named(group, own).ok_or_else(not_there)?;
            let shown = format!("{}@{}", one.dataset, label.name);
            let name = volume_name(group, own, label.name);
            let has_name = volumes.snapshots_of(group, own).any(|one| one.name == label.name);
            if has_name || volumes.named(group, &name).is_some() {
                return Err(ProviderError::Exists { what: shown });
            }
            record_tags(label.record).ok_or_else(|| too_long(&shown))?;
            pool::check_space(volume, volumes.pool_of(volume))?;
            let mut prepared = self.prepared.lock().unwrap_or_else(PoisonError::into_inner);
            prepared.insert(one.dataset.name.clone(), volume.uuid.clone());
        }
        Ok(())
    }

    fn create(&self, group: &[HostSnapshotScope], label: &HostSnapshotLabel<'_>) -> ProviderResult<()> {
        for one in group {
            self.make(one, label)
                .inspect_err(|error| self.clean_up_after(one, label, error))?;
        }
        Ok(())
    }

    fn commit(&self, group: &[HostSnapshotScope], label: &HostSnapshotLabel<'_>) -> ProviderResult<()> {
        for one in group {
            let name = HostSnapshotName {
                dataset: one.dataset.clone(),
                name: label.name.to_owned(),
            };
            let shown = name.to_string();
            let volumes = self.volumes_of(&one.dataset.name)?;
            let volume = volumes.snapshot(&name)?.volume;
            let new = record_tags(label.record).ok_or_else(|| too_long(&shown))?;
            let mut arguments = vec!["-qq"];
            for old in volume.tags.records.iter().filter(|old| !new.contains(old)) {
                arguments.extend(["--deltag", old]);
            }
            for tag in new.iter().filter(|tag| !volume.tags.records.contains(tag)) {
                arguments.extend(["--addtag", tag]);
            }
            if arguments.len() > 1 {
                let full = volume.full_name();
                arguments.push(&full);
                self.ask("write the record of", &shown, LVCHANGE, &arguments)?;
            }
        }
        Ok(())
    }

    fn destroy(&self, snapshot: &HostSnapshotName) -> ProviderResult<()> {
        let _lock = self.lock_holds()?;
        let volumes = self.volumes_of(&snapshot.dataset.name)?;
        let volume = volumes.snapshot(snapshot)?.volume;
        let shown = snapshot.to_string();
        if !volume.tags.holds.is_empty() {
            return Err(ProviderError::Held {
                what: shown,
                reason: format!("by {}", volume.tags.holds.join(", ")),
            });
        }
        self.remove(volume, &shown)
    }

    fn hold(&self, snapshot: &HostSnapshotName, tag: &str) -> ProviderResult<()> {
        check_name(tag)?;
        let _lock = self.lock_holds()?;
        let volumes = self.volumes_of(&snapshot.dataset.name)?;
        let volume = volumes.snapshot(snapshot)?.volume;
        let shown = snapshot.to_string();
        if volume.tags.holds.iter().any(|held| held == tag) {
            return Err(ProviderError::Held {
                what: shown,
                reason: format!("by {tag} already"),
            });
        }
        let arguments = ["-qq", "--addtag", HELD, "--addtag", &hold_tag(tag), &volume.full_name()];
        self.ask("hold", &shown, LVCHANGE, &arguments).map(drop)
    }

    fn hold_tags(&self, snapshot: &HostSnapshotName) -> ProviderResult<Option<Vec<String>>> {
        let volumes = self.volumes_of(&snapshot.dataset.name)?;
        Ok(Some(volumes.snapshot(snapshot)?.volume.tags.holds.clone()))
    }

    fn release(&self, snapshot: &HostSnapshotName, tag: &str) -> ProviderResult<()> {
        check_name(tag)?;
        let _lock = self.lock_holds()?;
        let volumes = self.volumes_of(&snapshot.dataset.name)?;
        let volume = volumes.snapshot(snapshot)?.volume;
        let shown = snapshot.to_string();
        if volume.tags.holds.iter().all(|held| held != tag) {
            return Err(ProviderError::NotFound {
                what: format!("hold {tag} of {shown}"),
            });
        }
        let (own, full) = (hold_tag(tag), volume.full_name());
        let mut arguments = vec!["-qq", "--deltag", &own];
        if volume.tags.holds.len() == 1 {
            arguments.extend(["--deltag", HELD]);
        }
        arguments.push(&full);
        self.ask("release a hold on", &shown, LVCHANGE, &arguments).map(drop)
    }

    fn view(&self, snapshot: &HostSnapshotName, _label: &str) -> ProviderResult<View> {
        self.activate(snapshot)
    }

    fn clone_to(&self, snapshot: &HostSnapshotName, name: &str) -> ProviderResult<DatasetState> {
        let (group, own) = names_of(name)?;
        let volumes = self.volumes_of(&snapshot.dataset.name)?;
        let volume = volumes.snapshot(snapshot)?.volume;
        if volume.group != group {
            return Err(ProviderError::Refused {
                action: "clone",
                what: snapshot.to_string(),
                reason: format!("{name} would be in another volume group"),
            });
        }
        if volumes.named(group, own).is_some() {
            return Err(ProviderError::Exists { what: name.to_owned() });
        }
        pool::check_space(volume, volumes.pool_of(volume))?;
        let full = volume.full_name();
        let arguments = [
            "-qq",
            "--yes",
            "--snapshot",
            "--permission",
            "rw",
            "--setactivationskip",
            "n",
            "--name",
            own,
            &full,
        ];
        self.ask("clone", &snapshot.to_string(), LVCREATE, &arguments)?;
        self.await_device(&dataset(group, own).name, &device::path_of(group, own))?;
        self.dataset(name)
    }
}

mod error_messages;
#[cfg(test)]
mod tests;
