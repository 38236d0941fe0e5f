//! Random operations on a container that is cut off at a random change of its files: by a power cut or by a kill. In
//! some runs, a change fails once before, as on a full disk, and the operations continue.
//!
//! Checked each time: all flushed data is there, what was written since is there or not by sectors, snapshots that were
//! taken have exactly their content, deleted ones stay deleted, and the image files are consistent.

mod memory_folder;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use holdfast_block::{BlockDevice, BlockDeviceMut as _, SeededRandom, to_usize};

use self::memory_folder::{Cut, MemoryFolder};
use super::chain::{LiveChain, LiveOptions};
use super::collapse::{MergeObserver, MergeProgress};
use super::folder::ChainFolder as _;
use super::point::PointInTime;
use super::snapshot::NewSnapshot;
use super::switch::{CurrentState, NewContainer, create_in, switch_in};
use super::tree::ContainerTree;
use crate::file::Access;
use crate::formats::ploop;
use crate::formats::qcow2::check as qcow2_check;
use crate::formats::qcow2::header::load_header;
use crate::pipeline::copy_pipeline::Continue;
use crate::{Format, ImageId, Result};

const SECTOR: u64 = 512;
const DISK_BYTES: u64 = 640 << 10;

/// The contents that one sector may have.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Sector {
    current: u8,
    /// Contents since the last flush, also the flushed one.
    possible: Vec<u8>,
}

/// The expected content of the disk, a byte for each sector.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Expected(Vec<Sector>);

impl Expected {
    fn zeroes(size_bytes: u64) -> Self {
        let sector = Sector {
            current: 0,
            possible: vec![0],
        };
        Self(vec![sector; to_usize(size_bytes / SECTOR)])
    }

    fn write(&mut self, range: Range<u64>, value: u8) {
        for sector in &mut self.0[to_usize(range.start / SECTOR)..to_usize(range.end / SECTOR)] {
            sector.current = value;
            sector.possible.push(value);
        }
    }

    fn flush(&mut self) {
        for sector in &mut self.0 {
            sector.possible = vec![sector.current];
        }
    }

    fn grow(&mut self, size_bytes: u64) {
        self.0.resize(
            to_usize(size_bytes / SECTOR),
            Sector {
                current: 0,
                possible: vec![0],
            },
        );
    }

    fn currents(&self) -> Vec<u8> {
        self.0.iter().map(|sector| sector.current).collect()
    }

    fn size_bytes(&self) -> u64 {
        self.0.len() as u64 * SECTOR
    }
}

/// The sectors of a device, a byte for each; each sector must consist of one byte.
fn sectors(device: &dyn BlockDevice, what: &str) -> Vec<u8> {
    let mut bytes = vec![0; to_usize(device.size_bytes())];
    device
        .read_at(&mut bytes, 0)
        .unwrap_or_else(|error| panic!("{what}: {error}"));
    bytes
        .chunks(to_usize(SECTOR))
        .enumerate()
        .map(|(number, sector)| {
            assert!(
                sector.iter().all(|byte| *byte == sector[0]),
                "{what}: sector {number} is torn"
            );
            sector[0]
        })
        .collect()
}

/// A container and what is expected of it.
struct Trial {
    folder: MemoryFolder,
    chain: Option<LiveChain>,
    expected: Mutex<Expected>,
    snapshots: BTreeMap<ImageId, Vec<u8>>,
    /// A snapshot that was being taken when an error came: its content.
    uncertain: Option<Vec<u8>>,
    /// Snapshots that were being deleted when an error came.
    dying: Vec<ImageId>,
    random: Mutex<SeededRandom>,
    seed: u64,
    value: Mutex<u8>,
    /// A change of the content has failed: each of its sectors has the old or the new content.
    has_failed_change: AtomicBool,
}

/// Writes during a merge.
struct Writer<'a>(&'a Trial);

impl MergeObserver for Writer<'_> {
    fn advanced(&self, progress: &MergeProgress) -> Continue {
        assert!(progress.position <= progress.size_bytes);
        let count = self.0.random.lock().unwrap().below(4);
        for _ in 0..count {
            if self.0.folder.is_cut() {
                return Continue::Stop;
            }
            // An error of the cut is seen by the operation that runs.
            self.0.change().ok();
        }
        if self.0.random.lock().unwrap().one_in(12) {
            return Continue::Stop;
        }
        Continue::Go
    }
}

impl Trial {
    fn new(seed: u64, format: Format) -> Self {
        let folder = MemoryFolder::default();
        let new = NewContainer {
            size_bytes: DISK_BYTES,
            format,
            properties: BTreeMap::new(),
        };
        create_in(&folder, &new).unwrap();
        let mut trial = Self {
            folder,
            chain: None,
            expected: Mutex::new(Expected::zeroes(DISK_BYTES)),
            snapshots: BTreeMap::new(),
            uncertain: None,
            dying: Vec::new(),
            random: Mutex::new(SeededRandom::new(seed)),
            seed,
            value: Mutex::new(0),
            has_failed_change: AtomicBool::new(false),
        };
        trial.open().unwrap();
        trial
    }

    fn open(&mut self) -> Result<()> {
        self.chain = None;
        self.chain = Some(LiveChain::open_in(
            Arc::new(self.folder.clone()),
            LiveOptions::default(),
        )?);
        Ok(())
    }

    fn chain(&self) -> &LiveChain {
        self.chain.as_ref().expect("it is open between operations")
    }

    fn below(&self, bound: u64) -> u64 {
        self.random.lock().unwrap().below(bound)
    }

    fn change(&self) -> holdfast_block::Result<()> {
        let changed = self.try_change();
        if changed.is_err() {
            self.has_failed_change.store(true, Ordering::Relaxed);
        }
        changed
    }

    /// A write, zeroing, trim or flush.
    fn try_change(&self) -> holdfast_block::Result<()> {
        let chain = self.chain();
        let count = chain.size_bytes() / SECTOR;
        let start = self.below(count);
        let length = 1 + self.below((count - start).min(1 + self.below(300)));
        let range = start * SECTOR..(start + length) * SECTOR;
        let value = {
            let mut value = self.value.lock().unwrap();
            *value = *value % 250 + 1;
            *value
        };
        let mut expected = self.expected.lock().unwrap();
        match self.below(10) {
            0 => {
                expected.write(range.clone(), 0);
                chain.write_zeroes(range)
            }
            1 => self.trim(&mut expected, range),
            2 => {
                chain.flush()?;
                // What a failed change has left is not known before the content is verified.
                if !self.has_failed_change.load(Ordering::Relaxed) {
                    expected.flush();
                }
                Ok(())
            }
            _ => {
                expected.write(range.clone(), value);
                chain.write_at(&vec![value; to_usize(range.end - range.start)], range.start)
            }
        }
    }

    /// Each trimmed sector is zero or unchanged afterwards.
    fn trim(&self, expected: &mut Expected, range: Range<u64>) -> holdfast_block::Result<()> {
        let sectors_of = to_usize(range.start / SECTOR)..to_usize(range.end / SECTOR);
        for sector in &mut expected.0[sectors_of.clone()] {
            sector.possible.push(0);
        }
        let trimmed = self.chain().trim(range);
        if trimmed.is_ok() {
            let found = sectors(self.chain(), "after a trim");
            let is_uncertain = self.has_failed_change.load(Ordering::Relaxed);
            for (sector, found) in expected.0[sectors_of.clone()].iter_mut().zip(&found[sectors_of]) {
                let is_known = *found == 0 || *found == sector.current;
                assert!(
                    is_known || (is_uncertain && sector.possible.contains(found)),
                    "seed {}: trim",
                    self.seed
                );
                sector.current = *found;
            }
        }
        trimmed
    }

    fn snapshot(&mut self) -> Result<()> {
        let content = self.expected.lock().unwrap().currents();
        self.uncertain = Some(content.clone());
        let mut prepared = self.chain().prepare_snapshot(NewSnapshot::default())?;
        if self.below(4) > 0 {
            prepared.stage()?;
        }
        let id = prepared.commit_then(|taken| {
            if taken.is_ok() {
                self.expected.lock().unwrap().flush();
            }
            // Before the new tree is durable. An error is seen by the commit.
            for _ in 0..self.below(4) {
                self.change().ok();
            }
        })?;
        self.uncertain = None;
        self.snapshots.insert(id, content);
        Ok(())
    }

    fn delete(&mut self) -> Result<()> {
        let count = self.snapshots.len() as u64;
        if count > 0 {
            let at = to_usize(self.below(count));
            let id = *self.snapshots.keys().nth(at).expect("below the count");
            self.snapshots.remove(&id);
            self.dying.push(id);
            self.chain().hide_snapshots(&[id])?;
        }
        self.collapse()
    }

    fn collapse(&self) -> Result<()> {
        match self.chain().collapse(&Writer(self)) {
            Err(crate::Error::Device(holdfast_block::Error::Io { source, .. }))
                if source.kind() == std::io::ErrorKind::Interrupted =>
            {
                Ok(())
            }
            other => other.map(|_| ()),
        }
    }

    fn grow(&self) -> Result<()> {
        let more = (1 + self.below(40)) * SECTOR;
        let size_bytes = self.chain().size_bytes() + more;
        self.chain().grow(size_bytes)?;
        self.expected.lock().unwrap().grow(size_bytes);
        Ok(())
    }

    /// Switches to a snapshot; without one, only opens the container again.
    fn switch(&mut self) -> Result<()> {
        self.chain().flush()?;
        self.expected.lock().unwrap().flush();
        self.chain = None;
        let count = self.snapshots.len() as u64;
        if count > 0 {
            let at = to_usize(self.below(count));
            let id = *self.snapshots.keys().nth(at).expect("below the count");
            let content = self.snapshots[&id].clone();
            let tree = ContainerTree::load(&self.folder)?;
            switch_in(&self.folder, &tree, id, &CurrentState::Discard)?;
            let mut expected = Expected::zeroes(content.len() as u64 * SECTOR);
            for (sector, value) in expected.0.iter_mut().zip(&content) {
                *sector = Sector {
                    current: *value,
                    possible: vec![*value],
                };
            }
            *self.expected.lock().unwrap() = expected;
        }
        self.open()
    }

    fn step(&mut self) -> Result<()> {
        match self.below(16) {
            0 | 1 => self.snapshot(),
            2 | 3 => self.delete(),
            4 if self.below(2) == 0 => self.grow(),
            5 if self.below(2) == 0 => self.switch(),
            _ => Ok(self.change()?),
        }
    }

    fn verify_content(&self, what: &str) {
        let found = sectors(self.chain(), what);
        let mut expected = self.expected.lock().unwrap();
        if self.has_failed_change.swap(false, Ordering::Relaxed) {
            for (number, (sector, value)) in expected.0.iter_mut().zip(&found).enumerate() {
                assert!(
                    sector.possible.contains(value),
                    "{what}: sector {number} is {value}, not one of {:?}",
                    sector.possible
                );
                sector.current = *value;
            }
        }
        assert!(found == expected.currents(), "{what}: another content");
    }

    fn verify_snapshots(&self, what: &str) {
        let tree = self.chain().tree();
        for (id, content) in &self.snapshots {
            let point =
                PointInTime::open_in(&self.folder, &tree, *id).unwrap_or_else(|error| panic!("{what}: {error}"));
            assert!(sectors(&point, what) == *content, "{what}: another content of {id}");
        }
        for (id, _) in tree.snapshots() {
            assert!(
                self.snapshots.contains_key(&id) || self.dying.contains(&id),
                "{what}: {id} is unknown"
            );
        }
    }

    fn verify_files(&self, what: &str) {
        let tree = self.chain().tree();
        for layer in tree.layers() {
            let file = self.folder.open(&layer.file, Access::Read).unwrap();
            let report = if layer.format == Format::Qcow2 {
                let header = load_header(&*file, what).unwrap();
                qcow2_check::check(&file, &header, what, None).unwrap()
            } else {
                let header = ploop::header::PloopHeader::load(&*file, what).unwrap();
                ploop::check::check(&*file, &header).unwrap()
            };
            assert_eq!(
                report.corruption_count, 0,
                "{what}: {}: {:?}",
                layer.file, report.problems
            );
        }
        let names = self.folder.names().unwrap();
        let leftover = names.iter().find(|name| tree.is_leftover(name));
        assert_eq!(leftover, None, "{what}");
    }

    /// Adopts what an operation has done that failed once, and repeats what is not done.
    fn adopt_fault(&mut self, what: &str) {
        assert!(
            self.chain.as_ref().is_none_or(|chain| !chain.has_failed()),
            "{what}: it refuses writes"
        );
        if let Err(error) = self.try_adopt_fault() {
            let text = holdfast_block::error_text(&error);
            assert!(self.folder.is_cut(), "{what}: {text}");
        }
    }

    fn try_adopt_fault(&mut self) -> Result<()> {
        // A layer refuses writes after a failed flush: they may be lost.
        if self.chain.as_ref().is_none_or(|chain| chain.flush().is_err()) {
            self.open()?;
            self.has_failed_change.store(true, Ordering::Relaxed);
        }
        self.uncertain = None;
        let visible = self.chain().tree().snapshots();
        let dying = self
            .dying
            .iter()
            .copied()
            .filter(|id| visible.iter().any(|(other, _)| other == id));
        self.chain().hide_snapshots(&dying.collect::<Vec<_>>())?;
        let size_bytes = self.chain().size_bytes();
        self.chain().grow(size_bytes)?;
        self.expected.lock().unwrap().grow(size_bytes);
        Ok(())
    }

    /// Adopts the state after a cut: which of the uncertain changes have happened.
    fn adopt(&mut self, cut: Cut, what: &str) {
        let tree = self.chain().tree();
        if let Some(content) = self.uncertain.take() {
            let listed = tree.snapshots();
            let taken = listed
                .iter()
                .find(|(id, _)| !self.snapshots.contains_key(id) && !self.dying.contains(id));
            if let Some((id, _)) = taken {
                self.snapshots.insert(*id, content);
            }
        }
        self.dying.clear();
        self.has_failed_change.store(false, Ordering::Relaxed);
        for (id, _) in tree.snapshots() {
            if let std::collections::btree_map::Entry::Vacant(entry) = self.snapshots.entry(id) {
                let point = PointInTime::open_in(&self.folder, &tree, id).unwrap();
                entry.insert(sectors(&point, what));
            }
        }
        let found = sectors(self.chain(), what);
        let mut expected = self.expected.lock().unwrap();
        assert!(
            found.len() >= expected.0.len() || !self.snapshots.is_empty(),
            "{what}: it shrank"
        );
        let mut adopted = Expected::zeroes(found.len() as u64 * SECTOR);
        for (number, value) in found.iter().enumerate() {
            let mut possible = vec![*value];
            if let Some(sector) = expected.0.get(number) {
                if cut == Cut::Kill {
                    // A power cut before the next flush may still undo it.
                    possible.clone_from(&sector.possible);
                }
                assert!(
                    sector.possible.contains(value),
                    "{what}: sector {number} is {value}, not one of {:?}",
                    sector.possible
                );
            } else {
                assert_eq!(*value, 0, "{what}: sector {number} past the old end");
            }
            adopted.0[number] = Sector {
                current: *value,
                possible,
            };
        }
        *expected = adopted;
    }
}

/// What happens to the files before they are cut off.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    None,
    /// A change fails once.
    Once,
}

/// Runs random operations until the files are cut off, several times.
fn run(seed: u64, format: Format, fault: Fault) {
    let mut trial = Trial::new(seed, format);
    for round in 0..4 {
        let what = format!("seed {seed} {format}, round {round}");
        let budget = 1 + trial.below(220);
        trial.folder.cut_after(budget);
        if fault == Fault::Once {
            trial.folder.fail_once_after(trial.below(budget));
        }
        let mut has_switched = false;
        for _ in 0..14 {
            let before = trial.folder.is_cut();
            assert!(!before, "{what}");
            let was_open = trial.chain.is_some();
            let was_pending = trial.folder.is_fault_pending();
            let result = trial.step();
            has_switched = was_open && trial.chain.is_none();
            if trial.folder.is_cut() {
                break;
            }
            let is_faulty = was_pending && !trial.folder.is_fault_pending();
            if let Err(error) = result {
                assert!(is_faulty, "{what}: {}", holdfast_block::error_text(&error));
            }
            if is_faulty {
                trial.adopt_fault(&what);
            }
            if trial.folder.is_cut() {
                break;
            }
            trial.verify_content(&what);
            trial.verify_snapshots(&what);
        }
        trial.chain = None;
        let cut = if trial.below(2) == 0 { Cut::Power } else { Cut::Kill };
        let seed_of_cut = trial.below(u64::MAX);
        trial.folder = trial.folder.after(cut, &mut SeededRandom::new(seed_of_cut));
        let what = format!("{what}, after a cut ({cut:?})");
        trial
            .open()
            .unwrap_or_else(|error| panic!("{what}: {}", holdfast_block::error_text(&error)));
        if has_switched {
            // The switch has happened or not: either content is right.
            let current = sectors(trial.chain(), &what);
            let is_known = current == trial.expected.lock().unwrap().currents()
                || trial.snapshots.values().any(|content| *content == current);
            assert!(is_known, "{what}: neither the old state nor a snapshot");
            let mut expected = Expected::zeroes(current.len() as u64 * SECTOR);
            for (sector, value) in expected.0.iter_mut().zip(&current) {
                sector.current = *value;
                sector.possible = vec![*value];
            }
            *trial.expected.lock().unwrap() = expected;
        }
        trial.adopt(cut, &what);
        trial.verify_content(&what);
        trial.verify_snapshots(&what);
        trial.verify_files(&what);
    }
    assert!(trial.expected.lock().unwrap().size_bytes() > 0);
}

/// Seeds of each format in a normal run; `HOLDFAST_CONTAINER_SEEDS` sets another number, and `HOLDFAST_SEED`
/// repeats one.
fn seeds() -> Range<u64> {
    if let Ok(seed) = std::env::var("HOLDFAST_SEED") {
        let seed = seed.parse().expect("a seed");
        return seed..seed + 1;
    }
    let count = std::env::var("HOLDFAST_CONTAINER_SEEDS").ok();
    0..count.map_or(8, |count| count.parse().expect("a number of seeds"))
}

#[test]
fn qcow2_containers_survive_cuts_at_any_change() {
    for seed in seeds() {
        run(seed, Format::Qcow2, Fault::None);
    }
}

#[test]
fn parallels_containers_survive_cuts_at_any_change() {
    for seed in seeds() {
        run(seed, Format::Parallels, Fault::None);
    }
}

#[test]
fn qcow2_containers_continue_after_a_failed_change() {
    for seed in seeds() {
        run(seed, Format::Qcow2, Fault::Once);
    }
}

#[test]
fn parallels_containers_continue_after_a_failed_change() {
    for seed in seeds() {
        run(seed, Format::Parallels, Fault::Once);
    }
}
