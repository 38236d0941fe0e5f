//! The copies of layers while the container is used.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use holdfast_block::{BlockDevice, ExtentKind, FileDevice, IoMode, error_text, for_each_extent};
use holdfast_engine::{
    Consistency, ContainerDocument, ContainerHold, ContainerPlace, HoldContainerRequest, Interrupt, Job, Unit,
    fold_layers,
};
use holdfast_image::{ContainerTree, ImageId, PinnedLayers};

use super::far::{ContainerRequest, ExpectedFile, Prepared, SeedFile};
use super::files::FileCopy;
use super::move_tools::{ContainerMove, ContainerMoveTools};
use super::report::ContainerRound;
use crate::error::{Error, Result};

/// A last pass of so few bytes is not worth another round.
const ENOUGH_BYTES: u64 = 4 << 20;
/// A round that takes less time than this is not worth another one.
const ENOUGH_TIME: Duration = Duration::from_millis(500);
/// A smaller file is sent as fast as it is compared with one of another name.
const SEED_BYTES_MIN: u64 = 1 << 20;
const ROUND_COUNT_MAX: usize = 12;
/// How long to wait for a merge that writes a layer.
const MERGE_PATIENCE: Duration = Duration::from_secs(600);
const MERGE_INTERVAL: Duration = Duration::from_millis(100);

/// The files that were copied.
pub(super) struct CopiedFiles<'a> {
    request: &'a ContainerMove<'a>,
    tools: &'a ContainerMoveTools<'a>,
    staging: PathBuf,
    seeds: SeedFiles,
    done: BTreeMap<String, u64>,
    pub(super) rounds: Vec<ContainerRound>,
}

/// Snapshots that hold the layers which were copied.
#[derive(Default)]
pub(super) struct Holds<'a> {
    holds: Vec<ContainerHold<'a>>,
    pins: Vec<PinnedLayers>,
}

impl Holds<'_> {
    /// The snapshots.
    pub(super) fn ids(&self) -> Vec<ImageId> {
        self.holds
            .iter()
            .filter_map(|hold| hold.taken().id.parse().ok())
            .collect()
    }

    /// Deletes the snapshots; their layers are merged. A failure is a warning.
    pub(super) fn release(self, place: &ContainerPlace, job: Job<'_>) {
        drop(self.pins);
        let tree = ContainerTree::open(&place.folder);
        let is_hidden = |hold: &ContainerHold<'_>| {
            let id = hold.taken().id.parse();
            tree.as_ref().is_ok_and(|tree| id.is_ok_and(|id| tree.is_hidden(id)))
        };
        let (hidden, listed): (Vec<_>, Vec<_>) = self.holds.into_iter().partition(is_hidden);
        for hold in listed.into_iter().rev() {
            hold.release(job);
        }
        if hidden.is_empty() {
            return;
        }
        drop(hidden);
        let never = Interrupt::new();
        let cleaning = Job {
            interrupt: &never,
            ..job
        };
        if let Err(error) = fold_layers(place, cleaning) {
            job.progress.warning(&format!(
                "the layers of this migration are merged by holdfast container merge: {}",
                error_text(&error)
            ));
        }
    }
}

impl<'a> CopiedFiles<'a> {
    pub(super) fn new(request: &'a ContainerMove<'a>, tools: &'a ContainerMoveTools<'a>, prepared: Prepared) -> Self {
        Self {
            request,
            tools,
            seeds: SeedFiles(prepared.seeds),
            staging: prepared.staging,
            done: BTreeMap::new(),
            rounds: Vec::new(),
        }
    }

    /// All files that must be there.
    pub(super) fn expected(&self, tree: &ContainerTree) -> Vec<ExpectedFile> {
        let is_layer = |name: &str| tree.layers().iter().any(|layer| layer.file == name);
        let memory = tree.memory_folders();
        let is_memory = |name: &str| name.split_once('/').is_some_and(|(folder, _)| memory.contains(&folder));
        let needed = self.done.iter().filter(|(name, _)| is_layer(name) || is_memory(name));
        let files = needed.map(|(name, bytes)| ExpectedFile {
            name: name.clone(),
            bytes: *bytes,
        });
        files.collect()
    }

    /// Copies the layers of a container that is used, until little is left. `holds` keeps them as they are.
    ///
    /// # Errors
    /// A layer cannot be copied, or the container is written faster than it is copied.
    pub(super) fn copy_used(&mut self, holds: &mut Holds<'a>, job: Job<'_>) -> Result<()> {
        job.progress.phase("copying the layers", Unit::Bytes);
        let clock = &*self.tools.clock;
        loop {
            let start = clock.now();
            let hold = HoldContainerRequest {
                place: self.request.place,
                comment: format!("for the migration to {}", self.request.plan.address),
                // What is written last follows when the container is unmounted.
                consistency: Consistency::Crash,
                now_s: self.request.now_s,
                process: self.request.process,
            };
            let hold = ContainerHold::hold(&hold, job)?;
            let paused = Duration::from_micros(hold.taken().paused_us);
            holds.holds.push(hold);
            let layers = self.pin(job)?;
            let [bytes, sent_bytes] = self.copy_layers(&layers, None, job)?;
            holds.pins.push(layers);
            let round = ContainerRound {
                bytes,
                sent_bytes,
                paused,
                duration: clock.now().saturating_sub(start),
            };
            self.rounds.push(round);
            self.tools.observer.round(&round);
            if !is_another_worthwhile(&self.rounds) {
                break;
            }
        }
        match self.rounds.last() {
            Some(last) if self.rounds.len() > 1 && last.duration > self.request.frozen_max => {
                Err(Error::ContainerChangesTooFast {
                    container: self.request.place.folder.clone(),
                    bytes: last.sent_bytes,
                    took_ms: last.duration.as_millis(),
                    frozen_max_ms: self.request.frozen_max.as_millis(),
                })
            }
            _ => Ok(()),
        }
    }

    /// Pins the layers below the top. Waits for a merge.
    fn pin(&self, job: Job<'_>) -> Result<PinnedLayers> {
        let folder = &self.request.place.folder;
        let deadline = job.clock.now() + MERGE_PATIENCE;
        loop {
            match PinnedLayers::below_top(folder) {
                Ok(layers) => return Ok(layers),
                Err(error) if error.is_corrupt() || job.clock.now() >= deadline => {
                    return Err(holdfast_engine::Error::from(error).into());
                }
                // The files of layers are renamed at the end of a merge.
                Err(_) => {
                    job.interrupt.check().map_err(holdfast_engine::Error::from)?;
                    job.clock.sleep(MERGE_INTERVAL);
                }
            }
        }
    }

    /// Copies the layers that are not there yet, and the memory of snapshots. Returns the bytes of their files, and the bytes
    /// that were sent.
    ///
    /// # Errors
    /// One cannot be copied, or the deadline has passed.
    pub(super) fn copy_layers(
        &mut self,
        layers: &PinnedLayers,
        deadline: Option<Duration>,
        job: Job<'_>,
    ) -> Result<[u64; 2]> {
        let missing: Vec<_> = layers
            .layers()
            .iter()
            .filter(|layer| self.done.get(&layer.layer().file) != Some(&layer.size_bytes()))
            .collect();
        job.progress
            .total(missing.iter().copied().map(BlockDevice::size_bytes).sum());
        let [mut bytes, mut sent_bytes] = [0; 2];
        for layer in missing {
            bytes += data_bytes(layer)?;
            let name = &layer.layer().file;
            let seed = self.seeds.take(name, layer.size_bytes(), layers.tree());
            sent_bytes += self.copy_file(layer, name, seed, deadline, job)?;
        }
        for folder in layers.tree().memory_folders() {
            let [more, sent] = self.copy_folder(folder, deadline, job)?;
            bytes += more;
            sent_bytes += sent;
        }
        Ok([bytes, sent_bytes])
    }

    /// Copies a folder with the memory of processes.
    fn copy_folder(&mut self, name: &str, deadline: Option<Duration>, job: Job<'_>) -> Result<[u64; 2]> {
        let path = self.request.place.folder.join(name);
        let failed = |source| holdfast_engine::Error::File {
            action: "read",
            path: path.clone(),
            source,
        };
        self.tools.far.request(&ContainerRequest::MakeFolder {
            folder: self.request.plan.folder.clone(),
            name: name.to_owned(),
        })?;
        let mut sums = [0; 2];
        for entry in std::fs::read_dir(&path).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let name = format!("{name}/{}", entry.file_name().to_string_lossy());
            if entry.file_type().map_err(failed)?.is_dir() {
                let [bytes, sent] = self.copy_folder(&name, deadline, job)?;
                sums = [sums[0] + bytes, sums[1] + sent];
                continue;
            }
            if self.done.contains_key(&name) {
                continue;
            }
            let file = FileDevice::open(&entry.path(), IoMode::Buffered).map_err(holdfast_engine::Error::from)?;
            sums[0] += file.size_bytes();
            sums[1] += self.copy_file(&file, &name, None, deadline, job)?;
        }
        Ok(sums)
    }

    fn store(&self, name: &str, text: &str) -> Result<()> {
        self.tools.far.request(&ContainerRequest::Store {
            folder: self.request.plan.folder.clone(),
            name: name.to_owned(),
            text: text.to_owned(),
        })
    }

    /// Stores the lists of layers and snapshots.
    pub(super) fn store_documents(&self, documents: &[ContainerDocument]) -> Result<()> {
        documents
            .iter()
            .try_for_each(|document| self.store(document.name, &document.text))
    }

    fn copy_file(
        &mut self,
        device: &dyn BlockDevice,
        name: &str,
        seed: Option<PathBuf>,
        deadline: Option<Duration>,
        job: Job<'_>,
    ) -> Result<u64> {
        let size = device.size_bytes();
        let target = self.staging.join(name);
        let is_received = seed.as_ref() == Some(&target);
        let copy = FileCopy {
            device,
            name,
            id: &self.request.plan.id,
            seed,
            deadline,
            target,
        };
        let sent = if size == 0 {
            self.store(name, "")?;
            0
        } else if is_received && copy.is_there(self.tools, &self.request.plan.folder)? {
            job.progress.advance(size);
            0
        } else {
            copy.run(self.tools, job)?
        };
        self.done.insert(name.to_owned(), size);
        Ok(sent)
    }
}

fn data_bytes(device: &dyn BlockDevice) -> Result<u64> {
    let mut bytes = 0;
    let counted = for_each_extent(device, 0..device.size_bytes(), |extent| {
        if extent.kind == ExtentKind::Data {
            bytes += extent.length;
        }
        Ok(())
    });
    counted.map_err(holdfast_engine::Error::from)?;
    Ok(bytes)
}

/// Files there that have a content similar to that of the files of the container.
struct SeedFiles(Vec<SeedFile>);

impl SeedFiles {
    /// The seed of a file of `bytes`. If the one of its name is missing or much smaller, it is one whose layer does not exist
    /// any more: merges give layers other names. A wrong seed costs time only.
    fn take(&mut self, name: &str, bytes: u64, tree: &ContainerTree) -> Option<PathBuf> {
        let is_layer = |seed: &SeedFile| tree.layers().iter().any(|layer| layer.file == seed.name);
        let is_similar = |seed: &SeedFile| seed.bytes >= bytes / 2;
        let of_name = self.0.iter().position(|seed| seed.name == name);
        let found = match of_name {
            Some(position) if is_similar(&self.0[position]) => Some(position),
            _ => {
                let spare = self.0.iter().enumerate().filter(|(_, seed)| !is_layer(seed));
                let similar = spare.filter(|(_, seed)| is_similar(seed) && seed.bytes >= SEED_BYTES_MIN);
                let largest = similar.max_by_key(|(_, seed)| seed.bytes);
                largest.map(|(position, _)| position).or(of_name)
            }
        };
        Some(self.0.swap_remove(found?).path)
    }
}

/// Whether another round would shorten the last pass.
fn is_another_worthwhile(rounds: &[ContainerRound]) -> bool {
    let Some(last) = rounds.last() else { return true };
    if last.sent_bytes <= ENOUGH_BYTES || last.duration <= ENOUGH_TIME || rounds.len() >= ROUND_COUNT_MAX {
        return false;
    }
    // Rounds that do not become smaller are written as fast as they are copied.
    let stays = |pair: &[ContainerRound]| pair[1].sent_bytes.saturating_mul(5) >= pair[0].sent_bytes.saturating_mul(4);
    let recent = &rounds[rounds.len().saturating_sub(3)..];
    rounds.len() < 4 || !recent.windows(2).all(stays)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{ContainerRound, is_another_worthwhile};

    fn rounds(sent_mib: &[u64]) -> Vec<ContainerRound> {
        let rounds = sent_mib.iter().map(|mib| ContainerRound {
            bytes: mib << 20,
            sent_bytes: mib << 20,
            paused: Duration::ZERO,
            duration: Duration::from_millis(100 * mib),
        });
        rounds.collect()
    }

    #[test]
    fn rounds_end_when_they_are_small_or_do_not_become_smaller() {
        for (sent_mib, expected) in [
            (&[] as &[u64], true),
            (&[1000], true),
            (&[3], false),
            (&[1000, 100], true),
            (&[1000, 100, 95], true),
            (&[1000, 100, 95, 96], false),
            (&[1000, 100, 50, 25], true),
            (&[1000, 100, 50, 4], false),
            (&[9; 12], false),
        ] {
            assert_eq!(is_another_worthwhile(&rounds(sent_mib)), expected, "{sent_mib:?}");
        }
    }
}
