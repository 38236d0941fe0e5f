//! ZFS, by its own program: OpenZFS, and its predecessors.
//!
//! `zfs get -Hp` prints exact numbers in every version; `zfs list` does not before 0.8. A version that does not
//! support `zfs version` (ZFS before 0.8, and zfs-fuse) creates host snapshots of only one dataset at a time, or of
//! one dataset with all its descendants.
//!
//! Source: zfs(8), zfsprops(7); OpenZFS 2.1, zfs-fuse 0.7.0.

mod changes;
mod clones;
mod pool;
mod replica;
pub(crate) mod stream;
mod table;
mod volume;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use holdfast_block::Clock;

use super::folder::check_name;
use super::mounts::Mounts;
use super::{
    Dataset, DatasetState, HostSnapshot, HostSnapshotLabel, HostSnapshotName, HostSnapshotScope, NotedSnapshot,
    Provider, ProviderError, ProviderKind, ProviderResult, View,
};
use crate::storage::retries::retry_while_in_use;
use crate::system::process::Tools;
pub use changes::{SendError, SendQuery};
pub use clones::{TemporaryClone, TemporaryCloneKind};
use error_messages::refusal;
pub use pool::{DeviceErrors, PoolDevice, PoolRoom, PoolState};
pub use replica::ZfsSide;
use table::{Properties, parse};
pub use volume::volume_device;

const ZFS: &str = "zfs";
const ZPOOL: &str = "zpool";
/// The property of a snapshot that contains Holdfast's record.
const RECORD: &str = "holdfast:record";
/// Limit on the bytes of a user property: 8 KiB since ZFS 0.6, and 1 KiB before.
const RECORD_BYTES_MAX: usize = 1000;
/// Limit on the bytes of a name with its dataset.
const NAME_BYTES_MAX: usize = 255;

// Contains no property that a user can set to any value: a line feed in such a value would look like another line of
// the answer.
const DATASET_PROPERTIES: &str = "type,used,referenced,usedbysnapshots,compressratio,available,origin";
const SNAPSHOT_PROPERTIES: &str = "type,creation,used,referenced,userrefs";
/// Includes properties that only newer versions have: the order of creation, and the identity.
const NEWER_PROPERTIES: &str = "type,creation,used,referenced,userrefs,createtxg,guid";

/// ZFS on this host.
#[derive(Clone)]
pub struct Zfs {
    tools: Arc<dyn Tools>,
    /// The folder under which clones for viewing snapshots are mounted.
    views: PathBuf,
    clock: Arc<dyn Clock>,
    /// The process that creates clones, as text for a property.
    maker: Option<String>,
    is_newer: OnceLock<bool>,
}

impl Zfs {
    /// Uses ZFS through `tools`. Views are mounted below `views`.
    pub fn new(tools: Arc<dyn Tools>, views: PathBuf, clock: Arc<dyn Clock>) -> Self {
        Self {
            tools,
            views,
            clock,
            maker: None,
            is_newer: OnceLock::new(),
        }
    }

    /// Sets the creator that is recorded in clones: one line without tabs.
    #[must_use]
    pub fn made_by(self, maker: String) -> Self {
        Self {
            maker: Some(maker),
            ..self
        }
    }

    /// Whether ZFS is 0.8 or later.
    fn is_newer(&self) -> ProviderResult<bool> {
        if let Some(known) = self.is_newer.get() {
            return Ok(*known);
        }
        let is_newer = self.tools.ask(ZFS, &["version"])?.is_success;
        Ok(*self.is_newer.get_or_init(|| is_newer))
    }

    /// Runs a command. A refusal becomes an error with the action and its object.
    fn ask(&self, action: &'static str, what: &str, arguments: &[&str]) -> ProviderResult<String> {
        let answer = self.tools.ask(ZFS, arguments)?;
        if answer.is_success {
            return Ok(answer.output);
        }
        Err(refusal(action, what, &answer.stderr))
    }

    /// Holdfast's records, by the full names of snapshots. Records may contain any text, also of other users. They
    /// are requested separately, so that they cannot change the meaning of other properties.
    fn records(&self, filter: &[&str], what: &str) -> ProviderResult<BTreeMap<String, String>> {
        let mut arguments = vec!["get", "-Hp", "-o", "name,value,source"];
        arguments.extend(filter);
        arguments.extend([RECORD, what]);
        Ok(table::records(&self.ask("inspect", what, &arguments)?))
    }

    fn get(&self, filter: &[&str], properties: &str, what: &str) -> ProviderResult<BTreeMap<String, Properties>> {
        let mut arguments = vec!["get", "-Hp", "-o", "name,property,value,source"];
        arguments.extend(filter);
        arguments.push(properties);
        if !what.is_empty() {
            arguments.push(what);
        }
        parse(&self.ask("inspect", what, &arguments)?)
    }

    fn state(name: &str, properties: &Properties, mounts: &Mounts) -> DatasetState {
        let value = |key: &str| properties.value(key).filter(|value| *value != "-");
        DatasetState {
            folder: mounts.of_zfs(name).map(Path::to_owned),
            is_volume: value("type") == Some("volume"),
            used_bytes: properties.number("used"),
            referenced_bytes: properties.number("referenced"),
            snapshots_bytes: properties.number("usedbysnapshots"),
            compression_percent: value("compressratio").and_then(table::percent),
            available_bytes: properties.number("available"),
            origin: value("origin").map(str::to_owned),
            dataset: dataset(name),
        }
    }

    /// Whether a snapshot has holds, as far as ZFS reports it.
    fn has_holds(&self, full: &str) -> bool {
        let properties = self.get(&[], "userrefs", full);
        let count = properties.ok().and_then(|found| found.get(full)?.number("userrefs"));
        count.is_some_and(|count| count > 0)
    }

    /// A dataset, with its descendants if the whole tree is included.
    fn with_descendants(&self, one: &HostSnapshotScope) -> ProviderResult<Vec<String>> {
        let name = &one.dataset.name;
        if !one.is_tree {
            return Ok(vec![name.clone()]);
        }
        let found = self.get(&["-r"], "type", name)?;
        Ok(found.into_keys().filter(|name| !name.contains('@')).collect())
    }
}

fn dataset(name: &str) -> Dataset {
    Dataset {
        provider: ProviderKind::Zfs,
        name: name.to_owned(),
    }
}

/// Whether ZFS accepts this name of a snapshot.
fn is_snapshot_name(name: &str) -> bool {
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"_.:- ".contains(&byte);
    !name.is_empty() && name.bytes().all(is_allowed)
}

/// The full name of a snapshot. It contains `@`, so it can never be the name of a dataset, whose whole content would
/// be destroyed.
fn full_name(dataset: &str, name: &str) -> ProviderResult<String> {
    check_name(name)?;
    any_full_name(dataset, name)
}

/// The full name of a snapshot that another program may have created, with a name that Holdfast does not use. Such a
/// snapshot is sent, received and held, but never destroyed.
fn any_full_name(dataset: &str, name: &str) -> ProviderResult<String> {
    if !is_snapshot_name(name) {
        return Err(ProviderError::Name {
            name: name.to_owned(),
            reason: "ZFS permits ASCII letters, digits, spaces and _ . : -",
        });
    }
    let full = format!("{dataset}@{name}");
    let is_dataset =
        !dataset.is_empty() && !dataset.starts_with(['-', '/']) && !dataset.contains(['@', '#', '%', ',', '\n', '\t']);
    if !is_dataset || full.len() > NAME_BYTES_MAX {
        return Err(ProviderError::Name {
            name: full,
            reason: "it is not the name of a ZFS dataset, or has more than 255 bytes",
        });
    }
    Ok(full)
}

pub(super) fn full(snapshot: &HostSnapshotName) -> ProviderResult<String> {
    full_name(&snapshot.dataset.name, &snapshot.name)
}

fn record_property(record: &str) -> ProviderResult<String> {
    if record.len() > RECORD_BYTES_MAX {
        return Err(ProviderError::Refused {
            action: "write",
            what: "the record of a snapshot".to_owned(),
            reason: format!(
                "it has {} bytes, but ZFS stores at most {RECORD_BYTES_MAX}",
                record.len()
            ),
        });
    }
    Ok(format!("{RECORD}={record}"))
}

impl Provider for Zfs {
    fn kind(&self) -> ProviderKind {
        ProviderKind::Zfs
    }

    fn datasets(&self) -> ProviderResult<Vec<DatasetState>> {
        let filter: &[&str] = if self.is_newer()? {
            &["-r", "-t", "filesystem,volume"]
        } else {
            // Snapshots are listed with the datasets, and skipped.
            &["-r"]
        };
        let mounts = Mounts::read()?;
        let found = self.get(filter, DATASET_PROPERTIES, "")?;
        let datasets = found.iter().filter(|(name, _)| !name.contains('@'));
        Ok(datasets
            .map(|(name, found)| Self::state(name, found, &mounts))
            .collect())
    }

    fn dataset(&self, name: &str) -> ProviderResult<DatasetState> {
        // The name becomes an argument.
        full_name(name, "check")?;
        let found = self.get(&[], DATASET_PROPERTIES, name)?;
        let properties = found
            .get(name)
            .ok_or_else(|| ProviderError::NotFound { what: name.to_owned() })?;
        Ok(Self::state(name, properties, &Mounts::read()?))
    }

    fn snapshots(&self, name: &str) -> ProviderResult<Vec<HostSnapshot>> {
        full_name(name, "check")?;
        let (filter, properties): (&[&str], &str) = if self.is_newer()? {
            (&["-r", "-d", "1", "-t", "snapshot"], NEWER_PROPERTIES)
        } else {
            (&["-r", "-d", "1"], SNAPSHOT_PROPERTIES)
        };
        let found = self.get(filter, properties, name)?;
        let records = self.records(filter, name)?;
        let mut snapshots = Vec::new();
        for (full, properties) in &found {
            let Some((of, snapshot)) = full.split_once('@') else {
                continue;
            };
            if of != name {
                continue;
            }
            let invalid = || ProviderError::Invalid {
                program: ZFS,
                detail: format!("{full} has no valid creation time"),
            };
            let time_s = properties.number("creation").ok_or_else(invalid)?;
            let transaction = properties.number("createtxg").unwrap_or_default();
            let order = (time_s, transaction, properties.number_in_answer);
            snapshots.push((
                order,
                HostSnapshot {
                    name: HostSnapshotName {
                        dataset: dataset(name),
                        name: snapshot.to_owned(),
                    },
                    time_s: i64::try_from(time_s).map_err(|_| invalid())?,
                    identity: properties.value("guid").unwrap_or_default().to_owned(),
                    used_bytes: properties.number("used"),
                    referenced_bytes: properties.number("referenced"),
                    hold_count: properties.number("userrefs").unwrap_or_default(),
                    record: records.get(full).cloned(),
                },
            ));
        }
        snapshots.sort_by_key(|(order, _)| *order);
        Ok(snapshots.into_iter().map(|(_, snapshot)| snapshot).collect())
    }

    fn groups(&self, wanted: &[HostSnapshotScope]) -> ProviderResult<Vec<Vec<HostSnapshotScope>>> {
        if !self.is_newer()? {
            return Ok(wanted.iter().map(|one| vec![one.clone()]).collect());
        }
        let mut groups: BTreeMap<(&str, bool), Vec<HostSnapshotScope>> = BTreeMap::new();
        for one in wanted {
            let pool = one.dataset.name.split('/').next().unwrap_or_default();
            groups.entry((pool, one.is_tree)).or_default().push(one.clone());
        }
        Ok(groups.into_values().collect())
    }

    fn prepare(&self, wanted: &[HostSnapshotScope], label: &HostSnapshotLabel<'_>) -> ProviderResult<()> {
        self.is_newer()?;
        let pools: BTreeSet<&str> = wanted
            .iter()
            .filter_map(|one| one.dataset.name.split('/').next())
            .collect();
        // A suspended pool would block the creation while the machines of all pools wait for it.
        for pool in pools {
            let found = self.pool(pool)?;
            if !found.is_open() {
                return Err(ProviderError::Suspended {
                    action: "make a host snapshot in",
                    what: pool.to_owned(),
                });
            }
        }
        wanted.iter().try_for_each(|one| {
            let full = full_name(&one.dataset.name, label.name)?;
            match self.get(&[], "type", &full) {
                Ok(_) => Err(ProviderError::Exists { what: full }),
                // Most cached data is written now, before the machines have to wait.
                Err(ProviderError::NotFound { .. }) => volume::write_out(one),
                Err(error) => Err(error),
            }
        })
    }

    fn create(&self, group: &[HostSnapshotScope], label: &HostSnapshotLabel<'_>) -> ProviderResult<()> {
        let record = record_property(label.record)?;
        let mut arguments = vec!["snapshot", "-o", &record];
        if group.iter().any(|one| one.is_tree) {
            arguments.push("-r");
        }
        let names = group.iter().map(|one| full_name(&one.dataset.name, label.name));
        let names = names.collect::<ProviderResult<Vec<_>>>()?;
        arguments.extend(names.iter().map(|name| &name[..]));
        group.iter().try_for_each(volume::write_out)?;
        self.ask("create", &names.join(", "), &arguments).map(drop)
    }

    fn commit(&self, group: &[HostSnapshotScope], label: &HostSnapshotLabel<'_>) -> ProviderResult<()> {
        let record = record_property(label.record)?;
        for one in group {
            for name in self.with_descendants(one)? {
                let full = full_name(&name, label.name)?;
                match self.ask("write the record of", &full, &["set", &record, &full]) {
                    // The dataset was created after the query.
                    Err(ProviderError::NotFound { .. }) if name != one.dataset.name => {}
                    other => drop(other?),
                }
            }
        }
        Ok(())
    }

    fn noted(&self, name: &str) -> ProviderResult<Vec<NotedSnapshot>> {
        full_name(name, "check")?;
        let filter: &[&str] = if self.is_newer()? {
            &["-r", "-d", "1", "-t", "snapshot"]
        } else {
            &["-r", "-d", "1"]
        };
        let records = self.records(filter, name)?;
        let of_it = records.into_iter().filter_map(|(full, record)| {
            let (of, snapshot) = full.split_once('@')?;
            (of == name).then(|| NotedSnapshot::new(dataset(name), snapshot.to_owned(), Some(record)))
        });
        Ok(of_it.collect())
    }

    fn clones(&self, snapshot: &HostSnapshotName) -> ProviderResult<Vec<String>> {
        self.clones_of(snapshot)
    }

    /// Repeats while the snapshot is in use and has no holds: for a moment after a view of it was removed, ZFS still
    /// has it open.
    fn destroy(&self, snapshot: &HostSnapshotName) -> ProviderResult<()> {
        let full = full(snapshot)?;
        let is_in_use = |error: &ProviderError| match error {
            ProviderError::Held { .. } => !self.has_holds(&full),
            _ => false,
        };
        let destroy = || self.ask("remove", &full, &["destroy", &full]);
        retry_while_in_use(&*self.clock, is_in_use, destroy).map(drop)
    }

    /// Queries only this snapshot, not all of the dataset, to keep the time between the check and the removal short.
    fn destroy_this(&self, snapshot: &HostSnapshot) -> ProviderResult<()> {
        let full = full(&snapshot.name)?;
        let found = self.get(&[], "creation,guid", &full)?;
        let found = found
            .get(&full)
            .ok_or_else(|| ProviderError::NotFound { what: full.clone() })?;
        let time_s = found.number("creation").and_then(|time_s| i64::try_from(time_s).ok());
        // If the list has no GUID, only the creation time identifies the snapshot.
        let has_its_guid = snapshot.identity.is_empty() || found.value("guid") == Some(&snapshot.identity);
        if time_s != Some(snapshot.time_s) || !has_its_guid {
            return Err(snapshot.replaced());
        }
        self.destroy(&snapshot.name)
    }

    fn hold(&self, snapshot: &HostSnapshotName, tag: &str) -> ProviderResult<()> {
        check_name(tag)?;
        let full = any_full_name(&snapshot.dataset.name, &snapshot.name)?;
        self.ask("hold", &full, &["hold", tag, &full]).map(drop)
    }

    fn hold_tags(&self, snapshot: &HostSnapshotName) -> ProviderResult<Option<Vec<String>>> {
        let full = any_full_name(&snapshot.dataset.name, &snapshot.name)?;
        match self.ask("list the holds of", &full, &["holds", &full]) {
            Ok(listed) => Ok(Some(parse_hold_tags(&full, &listed))),
            // zfs-fuse fails with an empty message.
            Err(ProviderError::Refused { reason, .. }) if reason.is_empty() => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn release(&self, snapshot: &HostSnapshotName, tag: &str) -> ProviderResult<()> {
        check_name(tag)?;
        let full = any_full_name(&snapshot.dataset.name, &snapshot.name)?;
        match self.ask("release a hold on", &full, &["release", tag, &full]) {
            Err(ProviderError::Refused { reason, .. }) if reason.contains("no such tag") => {
                Err(ProviderError::NotFound {
                    what: format!("hold {tag} of {snapshot}"),
                })
            }
            released => released.map(drop),
        }
    }

    fn view(&self, snapshot: &HostSnapshotName, label: &str) -> ProviderResult<View> {
        let full = full(snapshot)?;
        let mounted = Mounts::read()?.of_zfs(&snapshot.dataset.name).map(Path::to_owned);
        let inside = mounted.map(|folder| folder.join(".zfs/snapshot").join(&snapshot.name));
        // Without an automatic mount by the kernel, the folder exists but is empty.
        if let Some(folder) =
            inside.filter(|folder| std::fs::read_dir(folder).is_ok_and(|mut entries| entries.next().is_some()))
        {
            return Ok(View::permanent(folder));
        }
        self.clone_for_view(&full, label)
    }

    fn clone_to(&self, snapshot: &HostSnapshotName, name: &str) -> ProviderResult<DatasetState> {
        let full = full(snapshot)?;
        full_name(name, "check")?;
        self.ask("clone", &full, &["clone", &full, name])?;
        self.cloned(name, snapshot)
    }
}

mod error_messages;
/// The tags in the output of `zfs holds` for the snapshot `full`: a heading, then a line for each hold. Older
/// versions have no `-H`.
fn parse_hold_tags(full: &str, listed: &str) -> Vec<String> {
    let held = listed.lines().filter_map(|line| line.strip_prefix(full));
    held.filter_map(|rest| rest.split_whitespace().next().map(str::to_owned))
        .collect()
}

#[cfg(test)]
mod tests;
