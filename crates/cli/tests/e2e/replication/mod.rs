//! Replication on real file systems, on one host and between two by a real sshd.

mod append_only;
mod btrfs;
mod cut;
mod forged;
mod hostile;
pub(crate) mod sshd;
mod zfs;

use std::path::PathBuf;

use serde_json::Value;

use crate::rig::{Rig, noise};
use holdfast_test_kit::file_systems::{FileSystem, Mounted, Pool, system};

/// Reports of `replicate`.
pub(crate) fn reports() -> Vec<Value> {
    let Some(world) = World::on_btrfs() else {
        return Vec::new();
    };
    world.write("a", 1, 100_000);
    world.take("one");
    let planned = world
        .rig
        .report(&["replicate", &world.source, &world.target, "--dry-run"]);
    let sent = world.rig.report(&["replicate", &world.source, &world.target]);
    vec![planned, sent]
}

/// A dataset with files, and the name for its copy.
pub(crate) struct World {
    rig: Rig,
    source: String,
    target: String,
    /// The folder with the files of the source.
    folder: PathBuf,
    file_system: Box<dyn FileSystem>,
    _place: tempfile::TempDir,
}

#[expect(clippy::print_stdout, reason = "a test that is skipped says why")]
fn or_skip<T>(made: Result<T, String>) -> Option<T> {
    made.map_err(|reason| println!("skipped: {reason}")).ok()
}

impl World {
    fn on_zfs() -> Option<Self> {
        let place = tempfile::tempdir().unwrap();
        let pool = or_skip(Pool::at(&place.path().join("mounted")))?;
        let (source, folder) = pool.dataset();
        let above = source.split_once('/').unwrap().0;
        let target = format!("{above}/backup/host1/vms");
        Some(Self {
            rig: Rig::empty(),
            target,
            source,
            folder,
            file_system: Box::new(pool),
            _place: place,
        })
    }

    fn on_btrfs() -> Option<Self> {
        let place = tempfile::tempdir().unwrap();
        let point = place.path().canonicalize().unwrap().join("mounted");
        let mounted = or_skip(Mounted::at("btrfs", &point))?;
        let (source, folder) = mounted.dataset();
        std::fs::create_dir(point.join("backup")).unwrap();
        Some(Self {
            rig: Rig::empty(),
            target: point.join("backup/vms").display().to_string(),
            source,
            folder,
            file_system: Box::new(mounted),
            _place: place,
        })
    }

    /// The folder or dataset above the copy.
    fn above(&self) -> String {
        self.target.rsplit_once('/').unwrap().0.to_owned()
    }

    fn write(&self, name: &str, seed: u64, length: usize) {
        let written = std::fs::File::create(self.folder.join(name)).and_then(|mut file| {
            std::io::Write::write_all(&mut file, &noise(length, seed))?;
            file.sync_all()
        });
        written.unwrap();
    }

    fn take(&self, name: &str) {
        match self.file_system.name() {
            "zfs" => drop(system("zfs", &["snapshot", &format!("{}@{name}", self.source)]).unwrap()),
            _ => drop(
                self.rig
                    .ok(&["snapshot", &self.source, "--name", name, "--quiesce", "off"]),
            ),
        }
    }

    fn full(&self, dataset: &str, name: &str) -> String {
        match self.file_system.name() {
            "zfs" => format!("{dataset}@{name}"),
            _ => format!("btrfs:{dataset}@{name}"),
        }
    }

    /// The snapshots of a dataset, with the number of their holds.
    fn held(&self, dataset: &str) -> Vec<(String, u64)> {
        let word = match self.file_system.name() {
            "zfs" => format!("zfs:{dataset}"),
            _ => format!("btrfs:{dataset}"),
        };
        let report = self.rig.report(&["host", "list", &word]);
        let snapshots = report["datasets"][0]["snapshots"]
            .as_array()
            .cloned()
            .unwrap_or_default();
        let held = snapshots.iter().map(|one| {
            let count = one["hold_count"].as_u64().unwrap();
            (one["name"].as_str().unwrap().to_owned(), count)
        });
        held.collect()
    }

    fn names(&self, dataset: &str) -> Vec<String> {
        self.held(dataset).into_iter().map(|(name, _)| name).collect()
    }

    /// Replicates; returns the report about the dataset.
    fn replicate(&self, code: i32, words: &[&str]) -> Value {
        self.replicate_to(code, &self.target, words)
    }

    fn replicate_to(&self, code: i32, target: &str, words: &[&str]) -> Value {
        let words = [&["replicate", &self.source, target], words].concat();
        let document = self.rig.json(code, &words);
        assert!(document["report"].is_object(), "{document}");
        document["report"]["datasets"][0].clone()
    }

    fn status(&self) -> Value {
        self.replicate(0, &["--status"])
    }

    /// The content of a file in a snapshot of the copy.
    fn received(&self, snapshot: &str, file: &str) -> Vec<u8> {
        if self.file_system.name() == "btrfs" {
            let folder = std::path::Path::new(&self.target)
                .join(".holdfast/snapshots")
                .join(snapshot);
            return std::fs::read(folder.join(file)).unwrap();
        }
        let provider = self.file_system.provider();
        let name = holdfast_host::provider::HostSnapshotName {
            dataset: holdfast_host::provider::Dataset {
                provider: provider.kind(),
                name: self.target.clone(),
            },
            name: snapshot.to_owned(),
        };
        let view = provider.view(&name, "copy").unwrap();
        std::fs::read(view.path().join(file)).unwrap()
    }
}

fn names_and_holds(pairs: &[(&str, u64)]) -> Vec<(String, u64)> {
    pairs.iter().map(|(name, count)| ((*name).to_owned(), *count)).collect()
}

fn zfs(words: &[&str]) -> String {
    system("zfs", words).unwrap_or_else(|reason| panic!("{words:?}: {reason}"))
}
