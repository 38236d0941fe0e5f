//! The files of a mounted repository or snapshot.
//!
//! ```text
//! machines/web1/2026-11-26_17-05-01/vda.raw         a disk
//!                                   domain.xml      the configuration, memory, firmware variables
//!                                   snapshot.json   what `show --json` reports
//! machines/web1/latest                              a link to the newest snapshot
//! snapshots/3f2a9c1e                                links by id
//! tags/nightly/web1_2026-11-26_17-05-01             links by tag
//! ```

use std::collections::{BTreeMap, HashSet};
use std::ffi::OsStr;
use std::path::PathBuf;
use std::sync::Arc;

use holdfast_repo::{DiskContent, DiskRecord, Manifest, Repository};
use holdfast_serve::fuse::{Directory, InvalidName, TreeEntry};
use jiff::tz::TimeZone;

use super::content::{RecordContent, TextContent};
use super::names::{SnapshotPlace, places};
use crate::job::{DiskName, MachineName, Progress};
use crate::notes::is_memory;
use crate::repository::calendar::SKEW_MS;

const MACHINES: &str = "machines";
const SNAPSHOTS: &str = "snapshots";
const TAGS: &str = "tags";
const LATEST: &str = "latest";
/// Description of a snapshot.
const DESCRIPTION: &str = "snapshot.json";
/// Suffix of disks: programs recognize a raw disk by it.
const DISK_SUFFIX: &str = ".raw";

/// Makes the files of snapshots.
pub(super) struct TreeSource<'a> {
    pub(super) repository: &'a Arc<Repository>,
    pub(super) zone: &'a TimeZone,
    pub(super) describe: fn(&Manifest) -> Vec<u8>,
    pub(super) progress: &'a dyn Progress,
}

impl TreeSource<'_> {
    /// All snapshots, which are sorted by time.
    pub(super) fn repository(&self, manifests: &[Manifest]) -> Directory {
        let (now_ms, mut past) = (self.repository.now_ms(), HashSet::new());
        let newest_ms = manifests.last().map_or(0, |newest| newest.time_ms);
        let mut machines: BTreeMap<String, Directory> = BTreeMap::new();
        let mut snapshots = Directory::new(newest_ms);
        let mut tags: BTreeMap<String, Directory> = BTreeMap::new();
        for (manifest, place) in manifests.iter().zip(places(manifests, self.zone)) {
            let machine = machines.entry(place.machine.clone()).or_default();
            machine.modified_ms = manifest.time_ms;
            self.add(
                machine,
                &place.time,
                TreeEntry::Directory(self.snapshot(manifest, None)),
            );
            // A clock that was wrong leaves snapshots in the future, which are not the latest.
            let is_past = manifest.time_ms <= now_ms.saturating_add(SKEW_MS);
            if is_past || !past.contains(&place.machine) {
                self.add(machine, LATEST, link(&place.time, manifest));
            }
            if is_past {
                past.insert(place.machine.clone());
            }
            let target = format!("../{MACHINES}/{}/{}", place.machine, place.time);
            let (id, short) = (manifest.id.to_string(), manifest.id.short());
            let name = if snapshots.contains(OsStr::new(&short)) {
                id
            } else {
                short
            };
            self.add(&mut snapshots, &name, link(&target, manifest));
            for tag in &manifest.tags {
                let directory = tags.entry(MachineName::near(tag).to_string()).or_default();
                directory.modified_ms = manifest.time_ms;
                let SnapshotPlace { machine, time } = &place;
                self.add(
                    directory,
                    &format!("{machine}_{time}"),
                    link(&format!("../{target}"), manifest),
                );
            }
        }
        let folder = |directories: BTreeMap<String, Directory>| {
            let mut folder = Directory::new(newest_ms);
            for (name, directory) in directories {
                self.add(&mut folder, &name, TreeEntry::Directory(directory));
            }
            TreeEntry::Directory(folder)
        };
        let mut root = Directory::new(newest_ms);
        self.add(&mut root, MACHINES, folder(machines));
        self.add(&mut root, SNAPSHOTS, TreeEntry::Directory(snapshots));
        self.add(&mut root, TAGS, folder(tags));
        root
    }

    /// The files of a snapshot, or one of its disks.
    pub(super) fn snapshot(&self, manifest: &Manifest, disk: Option<&DiskName>) -> Directory {
        let mut directory = Directory::new(manifest.time_ms);
        for record in &manifest.disks {
            if disk.is_some_and(|disk| disk.as_str() != record.name) {
                continue;
            }
            let content = Arc::new(RecordContent {
                repository: Arc::clone(self.repository),
                snapshot: manifest.id,
                record: record.clone(),
            });
            let name = file_name(record);
            let modified_ms = manifest.time_ms;
            if directory.contains(OsStr::new(&name)) {
                self.skip(&InvalidName { name: name.into() });
            } else {
                self.add(&mut directory, &name, TreeEntry::File { content, modified_ms });
            }
        }
        if disk.is_none() && !directory.contains(OsStr::new(DESCRIPTION)) {
            let content = Arc::new(TextContent {
                identity: format!("{}/{DESCRIPTION}", manifest.id.short()),
                text: (self.describe)(manifest),
            });
            let modified_ms = manifest.time_ms;
            self.add(&mut directory, DESCRIPTION, TreeEntry::File { content, modified_ms });
        }
        directory
    }

    fn add(&self, directory: &mut Directory, name: &str, entry: TreeEntry) {
        if let Err(error) = directory.insert(name, entry) {
            self.skip(&error);
        }
    }

    fn skip(&self, error: &InvalidName) {
        self.progress.warning(&format!("a file is not shown: {error}"));
    }
}

/// The name of a disk or stream as a file.
fn file_name(record: &DiskRecord) -> String {
    match record.content {
        DiskContent::Blocks if !is_memory(record) => format!("{}{DISK_SUFFIX}", record.name),
        DiskContent::Blocks | DiskContent::Stream => record.name.clone(),
    }
}

fn link(target: &str, manifest: &Manifest) -> TreeEntry {
    TreeEntry::Link {
        target: PathBuf::from(target),
        modified_ms: manifest.time_ms,
    }
}
