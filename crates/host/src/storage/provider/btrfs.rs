//! btrfs: subvolumes, by its own program.
//!
//! A dataset is the folder of a subvolume: the root of each subvolume has inode 256. The read-only snapshots are in
//! its `.holdfast/snapshots`. btrfs excludes nested subvolumes from a snapshot, so snapshots do not contain each
//! other.
//!
//! Source: btrfs-subvolume(8), btrfs-filesystem(8); btrfs-progs 6.2.

mod making;
mod replica;
pub(crate) mod stream;

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::{Arc, Mutex};

use super::folder::{SNAPSHOT_FOLDER, SnapshotFolder, check_name, file_error, shown_words};
use super::leftovers::{ProviderLeftover, ProviderLeftoverKind};
use super::mounts::{Mount, Mounts};
use super::{
    Dataset, DatasetState, HostSnapshot, HostSnapshotLabel, HostSnapshotName, HostSnapshotScope, NotedSnapshot,
    Provider, ProviderError, ProviderKind, ProviderResult, View, leftovers,
};
use crate::storage::file_system;
use crate::system::process::Tools;
use making::PendingSnapshot;
pub use replica::BtrfsSide;

const BTRFS: &str = "btrfs";
/// The inode of the root of each subvolume.
const ROOT_INODE: u64 = 256;

/// btrfs on this host.
#[derive(Clone)]
pub struct Btrfs {
    tools: Arc<dyn Tools>,
    /// Pending snapshots without a name, by dataset and name.
    making: Arc<Mutex<BTreeMap<(String, String), PendingSnapshot>>>,
}

/// Whether a folder is the root of a subvolume.
pub(super) fn is_subvolume(folder: &Path) -> bool {
    let is_root = folder
        .symlink_metadata()
        .is_ok_and(|metadata| metadata.is_dir() && metadata.ino() == ROOT_INODE);
    is_root && file_system::is_on(folder, &[file_system::BTRFS])
}

fn dataset(name: &str) -> Dataset {
    Dataset {
        provider: ProviderKind::Btrfs,
        name: name.to_owned(),
    }
}

impl Btrfs {
    /// Uses btrfs through `tools`.
    pub fn new(tools: Arc<dyn Tools>) -> Self {
        Self {
            tools,
            making: Arc::default(),
        }
    }

    fn delete(&self, action: &'static str, what: &str, place: &Path) -> ProviderResult<()> {
        let arguments = ["subvolume", "delete", "--", &place.to_string_lossy()];
        self.ask(action, what, &arguments).map(drop)
    }

    fn ask(&self, action: &'static str, what: &str, arguments: &[&str]) -> ProviderResult<String> {
        let answer = self.tools.ask(BTRFS, arguments)?;
        if answer.is_success {
            return Ok(answer.output);
        }
        Err(Self::refusal(action, what, &answer.stderr))
    }

    /// The error for a message.
    fn refusal(action: &'static str, what: &str, stderr: &str) -> ProviderError {
        let what = what.to_owned();
        let has = |words: &str| stderr.contains(words);
        let reason = shown_words(stderr.trim().trim_start_matches("ERROR: ")).replace('\n', "; ");
        match () {
            () if has("No space left") => ProviderError::Full { action, what },
            () if has("No such file") => ProviderError::NotFound { what },
            () if has("already exists") => ProviderError::Exists { what },
            () => ProviderError::Refused { action, what, reason },
        }
    }

    fn folder(name: &str) -> ProviderResult<SnapshotFolder> {
        let folder = Path::new(name);
        if folder.is_absolute() && is_subvolume(folder) {
            return SnapshotFolder::of(folder);
        }
        Err(ProviderError::NotFound {
            what: format!("btrfs subvolume {name}"),
        })
    }

    /// Total and exclusive bytes of each folder, by its path.
    fn room(&self, folders: &[&str]) -> ProviderResult<BTreeMap<String, (u64, u64)>> {
        if folders.is_empty() {
            return Ok(BTreeMap::new());
        }
        let mut arguments = vec!["filesystem", "du", "-s", "--raw", "--"];
        arguments.extend(folders);
        let answer = self.ask("measure", &folders.join(", "), &arguments)?;
        // Columns: total, exclusive, set shared, name; headings in the first line.
        let rows = answer.lines().filter_map(|line| {
            let mut fields = line.split_whitespace();
            let (total, own) = (fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
            let name = line.trim_start().splitn(4, char::is_whitespace).last()?;
            let name = folders
                .iter()
                .find(|folder| line.ends_with(*folder))
                .copied()
                .unwrap_or(name);
            Some((name.to_owned(), (total, own)))
        });
        Ok(rows.collect())
    }

    /// The subvolumes that are visible below a mount, by their folders, without Holdfast's snapshots.
    fn subvolumes_below(&self, mount: &Mount) -> ProviderResult<Vec<String>> {
        let point = mount.point.to_string_lossy();
        let answer = self.ask("inspect", &point, &["subvolume", "list", "--", &point])?;
        // "ID 257 gen 9 top level 5 path @vms/web": the path is relative to the root of the file system, of which
        // only a part may be mounted.
        let paths = answer.lines().filter_map(|line| line.split_once(" path "));
        let seen = paths.filter_map(|(_, path)| {
            let path = Path::new("/").join(path);
            let inside = path.strip_prefix(&mount.root).ok()?;
            let is_snapshot = inside.components().any(|part| part.as_os_str() == SNAPSHOT_FOLDER);
            (!is_snapshot).then(|| mount.point.join(inside))
        });
        let folders = seen.filter(|folder| is_subvolume(folder));
        Ok(folders.map(|folder| folder.display().to_string()).collect())
    }

    /// The output of `btrfs subvolume show`.
    fn inspect(&self, place: &str) -> ProviderResult<SubvolumeInfo> {
        let output = self.ask("inspect", place, &["subvolume", "show", "--", place])?;
        let field = |key: &str| {
            let line = output.lines().find_map(|line| line.trim().strip_prefix(key))?;
            Some(line.trim().to_owned()).filter(|text| text != "-")
        };
        Ok(SubvolumeInfo {
            made_s: field("Creation time:").and_then(|text| parse_time(&text)),
            uuid: field("UUID:"),
            received_uuid: field("Received UUID:"),
            parent_uuid: field("Parent UUID:"),
            is_read_only: field("Flags:").is_some_and(|flags| flags.contains("readonly")),
        })
    }
}

/// The output of `btrfs subvolume show`.
struct SubvolumeInfo {
    made_s: Option<i64>,
    uuid: Option<String>,
    /// The UUID of the sent snapshot, once the snapshot has been received completely.
    received_uuid: Option<String>,
    /// The UUID of the subvolume from which the snapshot was created.
    parent_uuid: Option<String>,
    is_read_only: bool,
}

impl SubvolumeInfo {
    /// The identity that a snapshot shares with its copies.
    fn identity(&self) -> Option<&str> {
        self.received_uuid.as_deref().or(self.uuid.as_deref())
    }

    /// The record of a completely received snapshot without a note. It is empty, which distinguishes the snapshot
    /// from one whose process was killed before it wrote the note.
    fn received_record(&self) -> Option<String> {
        self.received_uuid.as_ref().map(|_| String::new())
    }
}

/// Parses `2026-11-22 16:07:46 +0000` to seconds since 1970-01-01 UTC.
fn parse_time(text: &str) -> Option<i64> {
    let mut fields = text.split(' ');
    let (date, time, zone) = (fields.next()?, fields.next()?, fields.next()?);
    let numbers = |text: &str, separator: char| {
        let numbers: Option<Vec<i64>> = text.split(separator).map(|number| number.parse().ok()).collect();
        numbers.filter(|numbers| numbers.len() == 3)
    };
    let (date, time) = (numbers(date, '-')?, numbers(time, ':')?);
    let offset: i64 = zone.parse().ok()?;
    let offset_s = (offset / 100 * 60 + offset % 100) * 60;
    // Converts the date to days since 1970 (proleptic Gregorian calendar), with years that begin in March.
    let (year, month, day) = (date[0] - i64::from(date[1] <= 2), (date[1] + 9) % 12, date[2] - 1);
    let days =
        year * 365 + year.div_euclid(4) - year.div_euclid(100) + year.div_euclid(400) + (month * 153 + 2) / 5 + day;
    Some((days - 719_468) * 86_400 + time[0] * 3600 + time[1] * 60 + time[2] - offset_s)
}

impl Provider for Btrfs {
    fn kind(&self) -> ProviderKind {
        ProviderKind::Btrfs
    }

    fn datasets(&self) -> ProviderResult<Vec<DatasetState>> {
        let mounts = Mounts::read()?;
        let mut names = Vec::new();
        for mount in mounts.of_kind(BTRFS) {
            if is_subvolume(&mount.point) {
                names.push(mount.point.display().to_string());
            }
            names.extend(self.subvolumes_below(mount)?);
        }
        names.sort();
        names.dedup();
        names.iter().map(|name| self.dataset(name)).collect()
    }

    fn dataset(&self, name: &str) -> ProviderResult<DatasetState> {
        Self::folder(name)?;
        let folder = Path::new(name);
        let room = rustix::fs::statvfs(folder).map_err(|error| file_error("inspect", folder, error.into()))?;
        let used = self.room(&[name])?.get(name).copied();
        Ok(DatasetState {
            dataset: dataset(name),
            folder: Some(folder.to_owned()),
            is_volume: false,
            used_bytes: used.map(|(_, own)| own),
            referenced_bytes: used.map(|(total, _)| total),
            snapshots_bytes: None,
            compression_percent: None,
            available_bytes: Some(room.f_bavail.saturating_mul(room.f_frsize)),
            origin: None,
        })
    }

    fn snapshots(&self, name: &str) -> ProviderResult<Vec<HostSnapshot>> {
        let snapshot_folder = Self::folder(name)?;
        let mut snapshots = Vec::new();
        for snapshot in snapshot_folder.names()? {
            let place = snapshot_folder.place(&snapshot);
            if !is_subvolume(&place) {
                continue;
            }
            let noted = snapshot_folder.noted(&snapshot);
            let info = self.inspect(&place.to_string_lossy())?;
            if !info.is_read_only {
                // The snapshot is being received, or was received partially.
                continue;
            }
            let time_s = noted.as_ref().map(|noted| noted.time_s).or(info.made_s);
            let received = info.received_record();
            snapshots.push(HostSnapshot {
                name: HostSnapshotName {
                    dataset: dataset(name),
                    name: snapshot.clone(),
                },
                time_s: time_s.ok_or_else(|| ProviderError::Invalid {
                    program: BTRFS,
                    detail: format!("{} has no valid creation time", place.display()),
                })?,
                identity: info.uuid.unwrap_or_default(),
                used_bytes: None,
                referenced_bytes: None,
                hold_count: snapshot_folder.hold_count(&snapshot)?,
                record: noted.map(|noted| noted.record).or(received),
            });
        }
        snapshots.sort_by(|a, b| (a.time_s, &a.name).cmp(&(b.time_s, &b.name)));
        Ok(snapshots)
    }

    fn measure(&self, snapshots: &mut [HostSnapshot]) -> ProviderResult<()> {
        let place = |snapshot: &HostSnapshot| {
            let dataset = Path::new(&snapshot.name.dataset.name);
            dataset
                .join(SNAPSHOT_FOLDER)
                .join("snapshots")
                .join(&snapshot.name.name)
                .display()
                .to_string()
        };
        let places: Vec<String> = snapshots.iter().map(place).collect();
        let names: Vec<&str> = places.iter().map(|place| &place[..]).collect();
        let room = self.room(&names)?;
        for (snapshot, place) in snapshots.iter_mut().zip(&places) {
            let found = room.get(place).copied();
            snapshot.referenced_bytes = found.map(|(total, _)| total);
            snapshot.used_bytes = found.map(|(_, own)| own);
        }
        Ok(())
    }

    fn groups(&self, wanted: &[HostSnapshotScope]) -> ProviderResult<Vec<Vec<HostSnapshotScope>>> {
        Ok(wanted.iter().map(|one| vec![one.clone()]).collect())
    }

    fn prepare(&self, wanted: &[HostSnapshotScope], label: &HostSnapshotLabel<'_>) -> ProviderResult<()> {
        for one in wanted {
            check_name(label.name)?;
            let snapshot_folder = Self::folder(&one.dataset.name)?;
            let shown = format!("{}@{}", one.dataset, label.name);
            snapshot_folder.check_free(label.name, &shown)?;
            if one.is_tree {
                return Err(ProviderError::Refused {
                    action: "make a snapshot of",
                    what: format!("{} and all below it", one.dataset),
                    reason: "btrfs cannot snapshot several subvolumes at one instant".to_owned(),
                });
            }
            let snapshot_folder = SnapshotFolder::make(Path::new(&one.dataset.name))?;
            self.begin(&snapshot_folder, &one.dataset.name, label.name, &shown)?;
        }
        Ok(())
    }

    fn create(&self, group: &[HostSnapshotScope], label: &HostSnapshotLabel<'_>) -> ProviderResult<()> {
        group.iter().try_for_each(|one| {
            let snapshot_folder = Self::folder(&one.dataset.name)?;
            let place = snapshot_folder.hidden_place(label.name);
            let arguments = [
                "subvolume",
                "snapshot",
                "-r",
                "--",
                &one.dataset.name,
                &place.to_string_lossy(),
            ];
            let shown = snapshot_folder.shown_place(label.name);
            self.ask("create", &shown.to_string_lossy(), &arguments)?;
            self.note_created(&one.dataset.name, label.name);
            Ok(())
        })
    }

    fn commit(&self, group: &[HostSnapshotScope], label: &HostSnapshotLabel<'_>) -> ProviderResult<()> {
        group.iter().try_for_each(|one| self.commit_one(one, label))
    }

    fn abandon(&self, wanted: &[HostSnapshotScope], label: &HostSnapshotLabel<'_>) {
        for one in wanted {
            // A leftover is found by its hidden name.
            self.revert_pending(&one.dataset.name, label.name).ok();
        }
    }

    fn noted(&self, name: &str) -> ProviderResult<Vec<NotedSnapshot>> {
        let snapshot_folder = Self::folder(name)?;
        let mut noted = Vec::new();
        for snapshot in snapshot_folder.names()? {
            let record = snapshot_folder.noted(&snapshot).map(|noted| noted.record);
            let place = snapshot_folder.place(&snapshot);
            // A snapshot that is being received has no note yet.
            if !is_subvolume(&place) {
                continue;
            }
            if record.is_some() {
                noted.push(NotedSnapshot::new(dataset(name), snapshot, record));
                continue;
            }
            let info = self.inspect(&place.to_string_lossy())?;
            if !info.is_read_only {
                continue;
            }
            let record = info.received_record();
            noted.push(NotedSnapshot::new(dataset(name), snapshot, record));
        }
        Ok(noted)
    }

    fn is_making(&self, name: &str) -> bool {
        Self::folder(name).is_ok_and(|snapshot_folder| snapshot_folder.is_making())
    }

    fn leftovers(&self, name: &str) -> ProviderResult<Vec<ProviderLeftover>> {
        let snapshot_folder = Self::folder(name)?;
        let mut found = leftovers::leftovers(&dataset(name))?;
        found.extend(self.partial_receives(&snapshot_folder, name)?);
        Ok(found)
    }

    fn remove_leftover(&self, leftover: &ProviderLeftover) -> ProviderResult<()> {
        let snapshot_folder = Self::folder(&leftover.dataset.name)?;
        let shown = leftover.place.display().to_string();
        if leftover.kind == ProviderLeftoverKind::HalfReceived {
            return self.clear_received(&snapshot_folder, leftover);
        }
        leftovers::remove(leftover, |place| {
            if is_subvolume(place) {
                return self.delete("remove", &shown, place);
            }
            std::fs::remove_dir_all(place).map_err(|source| file_error("remove", &leftover.place, source))
        })
    }

    fn destroy(&self, snapshot: &HostSnapshotName) -> ProviderResult<()> {
        if self.revert_pending(&snapshot.dataset.name, &snapshot.name)? {
            return Ok(());
        }
        let snapshot_folder = Self::folder(&snapshot.dataset.name)?;
        snapshot_folder.remove(snapshot, || {
            self.delete("remove", &snapshot.to_string(), &snapshot_folder.place(&snapshot.name))
        })
    }

    fn destroy_this(&self, snapshot: &HostSnapshot) -> ProviderResult<()> {
        let snapshot_folder = Self::folder(&snapshot.name.dataset.name)?;
        snapshot_folder.remove(&snapshot.name, || {
            let place = snapshot_folder.place(&snapshot.name.name);
            let info = self.inspect(&place.to_string_lossy())?;
            if info.uuid.unwrap_or_default() != snapshot.identity {
                return Err(snapshot.replaced());
            }
            self.delete("remove", &snapshot.name.to_string(), &place)
        })
    }

    fn hold(&self, snapshot: &HostSnapshotName, tag: &str) -> ProviderResult<()> {
        Self::folder(&snapshot.dataset.name)?.hold(snapshot, tag)
    }

    fn hold_tags(&self, snapshot: &HostSnapshotName) -> ProviderResult<Option<Vec<String>>> {
        Self::folder(&snapshot.dataset.name)?
            .hold_tags(&snapshot.name)
            .map(Some)
    }

    fn release(&self, snapshot: &HostSnapshotName, tag: &str) -> ProviderResult<()> {
        Self::folder(&snapshot.dataset.name)?.release(snapshot, tag)
    }

    fn view(&self, snapshot: &HostSnapshotName, _label: &str) -> ProviderResult<View> {
        let snapshot_folder = Self::folder(&snapshot.dataset.name)?;
        snapshot_folder.check_exists(snapshot)?;
        Ok(View::permanent(snapshot_folder.shown_place(&snapshot.name)))
    }

    fn clone_to(&self, snapshot: &HostSnapshotName, name: &str) -> ProviderResult<DatasetState> {
        let snapshot_folder = Self::folder(&snapshot.dataset.name)?;
        snapshot_folder.check_exists(snapshot)?;
        let place = snapshot_folder.place(&snapshot.name);
        if Path::new(name).symlink_metadata().is_ok() {
            // If the folder exists, btrfs would create the clone inside it.
            return Err(ProviderError::Exists { what: name.to_owned() });
        }
        let arguments = ["subvolume", "snapshot", "--", &place.to_string_lossy(), name];
        self.ask("clone", &snapshot.to_string(), &arguments)?;
        self.dataset(name)
    }
}

#[cfg(test)]
mod tests {
    use super::parse_time;

    #[test]
    fn times_of_btrfs_are_parsed() {
        assert_eq!(parse_time("1970-01-01 00:00:00 +0000"), Some(0));
        assert_eq!(parse_time("2026-11-22 16:07:46 +0000"), Some(1_795_363_666));
        assert_eq!(parse_time("2026-11-22 17:07:46 +0100"), Some(1_795_363_666));
        assert_eq!(parse_time("2024-02-29 23:59:59 -0330"), Some(1_709_263_799));
        assert_eq!(parse_time("-"), None);
    }
}
