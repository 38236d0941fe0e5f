//! Writing to a qcow2 image.
//!
//! Several threads may write into clusters that are not shared; metadata changes are made one at a time.
//!
//! A flush takes the changes of the metadata, and then syncs and writes without a lock: no read and no write waits for
//! a sync. What is written meanwhile becomes durable with the next flush. Flushes at the same time share a round of
//! syncs.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{PoisonError, RwLock};

use holdfast_block::{BlockDevice, BlockDeviceMut, ExtentList, FlushRounds, Result as BlockResult, to_usize};

use super::change::{trim_cluster, write_new, zero_cluster};
use super::entry::{DataLocation, L2Entry};
use super::layer::Qcow2Layer;
use super::state::{OldCluster, Qcow2State};
use crate::model::layered::{BackingUse, Layered as _};
use crate::{Error, Result};

/// A qcow2 image that can be written.
pub(crate) struct Qcow2Mut {
    size_bytes: u64,
    unit_bytes: u64,
    state: RwLock<Qcow2State>,
    /// Set after the autoclear bits of unmaintained features were cleared.
    is_announced: AtomicBool,
    /// The commits, one at a time.
    rounds: FlushRounds,
}

impl Qcow2Mut {
    pub(crate) fn new(layer: Qcow2Layer) -> Result<Self> {
        Ok(Self {
            size_bytes: layer.size_bytes,
            unit_bytes: layer.unit_bytes(),
            state: RwLock::new(Qcow2State::new(layer)?),
            is_announced: AtomicBool::new(false),
            rounds: FlushRounds::new(),
        })
    }

    /// Reads the layer while it is not changed.
    pub(crate) fn with_layer<T>(&self, read: impl FnOnce(&Qcow2Layer) -> Result<T>) -> Result<T> {
        read(&self.state.read().unwrap_or_else(PoisonError::into_inner).layer)
    }

    /// Prepares the first write.
    fn announce(&self) -> Result<()> {
        if !self.is_announced.load(Ordering::Acquire) {
            let mut state = self.state.write().unwrap_or_else(PoisonError::into_inner);
            state.check_health()?;
            if state.stale_autoclear() != 0 {
                state.clear_autoclear()?;
            }
            self.is_announced.store(true, Ordering::Release);
        }
        Ok(())
    }

    /// Writes in place as much as possible; returns the number of bytes.
    fn overwrite(&self, data: &[u8], offset: u64) -> Result<usize> {
        let state = self.state.read().unwrap_or_else(PoisonError::into_inner);
        state.check_health()?;
        let mut done = 0;
        while done < data.len() {
            let rest = &data[done..];
            let Some(host) = state.in_place(offset + done as u64, rest.len() as u64)? else {
                break;
            };
            let length = to_usize(host.end - host.start);
            state.layer.data.write_at(&rest[..length], host.start)?;
            done += length;
        }
        Ok(done)
    }

    /// Runs a change of metadata with exclusive access; if it finds damage, the image is marked as corrupt.
    fn change<T>(&self, change: impl FnOnce(&mut Qcow2State) -> Result<T>) -> Result<T> {
        let mut state = self.state.write().unwrap_or_else(PoisonError::into_inner);
        state.check_health()?;
        let result = change(&mut state);
        if let Err(error) = &result
            && is_metadata_damage(error, &state.layer.image)
        {
            state.mark_corrupt(error);
        }
        result
    }

    /// Makes all completed writes durable.
    fn commit(&self) -> Result<()> {
        self.rounds.flush(|| self.commit_round())
    }

    fn commit_round(&self) -> Result<()> {
        let only_data = {
            let state = self.state.read().unwrap_or_else(PoisonError::into_inner);
            state.check_health()?;
            (!state.is_changed()).then(|| state.data_files())
        };
        if let Some(files) = only_data {
            return files.sync().map_err(|error| {
                let error = Error::from(error);
                self.state
                    .write()
                    .unwrap_or_else(PoisonError::into_inner)
                    .poison(&error);
                error
            });
        }
        let changes = self.change(Qcow2State::begin_commit)?;
        let stored = changes.store();
        self.change(|state| state.end_commit(changes, stored))
    }

    fn write(&self, data: &[u8], offset: u64) -> Result<()> {
        self.announce()?;
        let mut done = 0;
        while done < data.len() {
            done += match self.overwrite(&data[done..], offset + done as u64) {
                // Return the error through `change`, which can mark the image as corrupt.
                Err(error) => self.change(|_| Err(error))?,
                Ok(count) => count,
            };
            if done < data.len() {
                let mut is_large = false;
                done += self.change(|state| {
                    let count = write_new(state, &data[done..], offset + done as u64)?;
                    is_large = state.is_large();
                    Ok(count)
                })?;
                if is_large {
                    self.commit()?;
                }
            }
        }
        Ok(())
    }

    /// Releases the clusters of `range`, also preallocated zero clusters: `range` is past the new end.
    pub(crate) fn release(&self, range: Range<u64>) -> Result<()> {
        let all = |_: &Qcow2State, _, _| Ok(0);
        self.for_each_cluster(range, all, |state, cluster, within| {
            trim_cluster(state, cluster, &within)
        })
    }

    /// Calls `act` for the clusters of `range` one by one: whole clusters, or parts of the first and the last one.
    /// `skip` returns how many bytes from an offset on are left out.
    fn for_each_cluster(
        &self,
        range: Range<u64>,
        skip: impl Fn(&Qcow2State, u64, u64) -> Result<u64>,
        act: impl Fn(&mut Qcow2State, u64, Range<u64>) -> Result<()>,
    ) -> Result<()> {
        self.announce()?;
        let mut at = range.start;
        while at < range.end {
            let mut is_large = false;
            at = self.change(|state| {
                let mut at = at;
                // A bounded number of clusters per lock, so that other threads can read in between.
                for _ in 0..1024 {
                    let skipped = skip(state, at, range.end - at)?;
                    if skipped > 0 {
                        at += skipped;
                    } else {
                        let geometry = state.geometry();
                        let within = geometry.offset_in_cluster(at);
                        let end = (within + (range.end - at)).min(geometry.cluster_bytes());
                        act(state, geometry.cluster_of(at), within..end)?;
                        at += end - within;
                        is_large = state.is_large();
                    }
                    if at >= range.end || is_large {
                        break;
                    }
                }
                Ok(at)
            })?;
            if is_large {
                self.commit()?;
            }
        }
        Ok(())
    }
}

impl Qcow2Mut {
    /// Allocates every cluster, so that later writes change no metadata; the content does not change.
    ///
    /// For images without a backing file.
    pub(crate) fn preallocate(&self) -> Result<()> {
        self.announce()?;
        let (mut cluster, mut end) = (0, 1);
        while cluster < end {
            let mut is_large = false;
            cluster = self.change(|state| {
                let geometry = state.geometry();
                end = geometry.clusters_for(state.layer.size_bytes);
                if cluster == end {
                    return Ok(cluster);
                }
                let hosts = match state.place() {
                    DataLocation::External => geometry.offset_of(cluster)..geometry.offset_of(end),
                    DataLocation::Inside => state.allocator.allocate(end - cluster)?,
                };
                // Data clusters must be inside the file; they are holes, and read as zero.
                let data_end = match state.place() {
                    DataLocation::External => state.layer.size_bytes,
                    DataLocation::Inside => hosts.end,
                };
                if state.layer.data.length_bytes()? < data_end {
                    state.layer.data.set_length(data_end)?;
                }
                let count = geometry.cluster_of(hosts.end - hosts.start).min(1 << 16);
                for number in 0..count {
                    let host = hosts.start + geometry.offset_of(number);
                    let old = state.meaning(cluster + number)?;
                    state.replace(
                        cluster + number,
                        old,
                        L2Entry::data(host, geometry),
                        OldCluster::Released,
                    )?;
                }
                if state.place() == DataLocation::Inside {
                    state
                        .allocator
                        .free_unreferenced(hosts.start + geometry.offset_of(count)..hosts.end)?;
                }
                is_large = state.is_large();
                Ok(cluster + count)
            })?;
            if is_large {
                self.commit()?;
            }
        }
        self.commit()
    }
}

/// Whether `error` is about damaged metadata of this image.
fn is_metadata_damage(error: &Error, own: &str) -> bool {
    matches!(error, Error::Corrupt { image, what, .. }
        if image == own && matches!(*what, "l2 entry" | "l2 table" | "refcount" | "refcount block" | "metadata"))
}

impl BlockDevice for Qcow2Mut {
    fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> BlockResult<()> {
        self.check_bounds(offset, buffer.len() as u64)?;
        let state = self.state.read().unwrap_or_else(PoisonError::into_inner);
        Ok(state.layer.read(buffer, offset, BackingUse::Backing)?)
    }

    fn extents(&self, range: Range<u64>, extent_count_max: usize) -> BlockResult<ExtentList> {
        self.check_bounds(range.start, range.end.saturating_sub(range.start))?;
        let state = self.state.read().unwrap_or_else(PoisonError::into_inner);
        Ok(state.layer.list_extents(range, extent_count_max, BackingUse::Backing)?)
    }

    fn block_size_bytes(&self) -> u32 {
        u32::try_from(self.unit_bytes).unwrap_or(u32::MAX)
    }
}

impl BlockDeviceMut for Qcow2Mut {
    fn write_at(&self, data: &[u8], offset: u64) -> BlockResult<()> {
        self.check_bounds(offset, data.len() as u64)?;
        Ok(self.write(data, offset)?)
    }

    fn write_zeroes(&self, range: Range<u64>) -> BlockResult<()> {
        self.check_bounds(range.start, range.end.saturating_sub(range.start))?;
        Ok(self.for_each_cluster(range, Qcow2State::zero_run, zero_cluster)?)
    }

    fn trim(&self, range: Range<u64>) -> BlockResult<()> {
        self.check_bounds(range.start, range.end.saturating_sub(range.start))?;
        let act = |state: &mut Qcow2State, cluster, within| trim_cluster(state, cluster, &within);
        Ok(self.for_each_cluster(range, Qcow2State::zero_run, act)?)
    }

    fn flush(&self) -> BlockResult<()> {
        Ok(self.commit()?)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::{Qcow2Layer, Qcow2Mut};
    use crate::file::ImageFile;
    use crate::file::flush_tests::syncs_of_joined_flushes;
    use crate::file::memory::RecordingFile;
    use crate::formats::qcow2::header::load_header;
    use crate::formats::qcow2::layout::{new_header, write_empty};
    use crate::model::create_options::CreateOptions;

    #[test]
    fn flushes_at_the_same_time_take_two_rounds() {
        let recording = Arc::new(RecordingFile::new(Vec::new(), None));
        write_empty(&*recording, new_header(&CreateOptions::qcow2(4 << 20)).unwrap()).unwrap();
        let file: Arc<dyn ImageFile> = recording.clone();
        let header = load_header(&*file, "image").unwrap();
        let device = Qcow2Mut::new(Qcow2Layer::new("image".into(), header, file, None, None).unwrap()).unwrap();
        let count = syncs_of_joined_flushes(&recording, &device, &device.rounds, &|| device.commit_round());
        assert_eq!(count, 4, "data and tables, twice");
    }
}
