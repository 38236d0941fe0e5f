//! Writing to a qcow2 image.
//!
//! Many threads may write into clusters that the image has for itself; everything that changes metadata is one at a time.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{PoisonError, RwLock};

use holdfast_block::{BlockDevice, BlockDeviceMut, ExtentList, Result as BlockResult, to_usize};

use super::entry::{DataPlace, Entry, Host, Meaning, Sharing};
use super::geometry::{Geometry, L2Kind};
use super::layer::{Below, Layer};
use super::mapping::RunKind;
use super::state::{OldHost, State, subcluster_mask};
use crate::{Error, Result};

/// A qcow2 image that can be written.
pub(crate) struct Qcow2Mut {
    size_bytes: u64,
    block_size_bytes: u32,
    state: RwLock<State>,
    /// Set once the header says what this program does not keep up to date.
    is_announced: AtomicBool,
}

impl Qcow2Mut {
    pub(crate) fn new(layer: Layer) -> Result<Self> {
        Ok(Self {
            size_bytes: layer.size_bytes,
            block_size_bytes: layer.block_size_bytes(),
            state: RwLock::new(State::new(layer)?),
            is_announced: AtomicBool::new(false),
        })
    }

    /// Announces the first write.
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

    /// Writes in place as much as can be; gives the number of bytes.
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

    /// Runs a change of metadata, alone; damage that it finds is written into the header.
    fn change<T>(&self, change: impl FnOnce(&mut State) -> Result<T>) -> Result<T> {
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

    fn write(&self, data: &[u8], offset: u64) -> Result<()> {
        self.announce()?;
        let mut done = 0;
        while done < data.len() {
            done += match self.overwrite(&data[done..], offset + done as u64) {
                // Said again where it can be noted in the header.
                Err(error) => self.change(|_| Err(error))?,
                Ok(count) => count,
            };
            if done < data.len() {
                done += self.change(|state| {
                    let count = write_new(state, &data[done..], offset + done as u64)?;
                    state.commit_if_large()?;
                    Ok(count)
                })?;
            }
        }
        Ok(())
    }

    /// Calls `act` with the clusters of `range` one by one: whole clusters, or parts of the first and the last one.
    fn for_each_cluster(
        &self,
        range: Range<u64>,
        act: impl Fn(&mut State, u64, Range<u64>) -> Result<()>,
    ) -> Result<()> {
        self.announce()?;
        let mut at = range.start;
        while at < range.end {
            at = self.change(|state| {
                let mut at = at;
                // A bounded number of clusters per turn, so that others can read in between.
                for _ in 0..1024 {
                    let skipped = state.zero_run(at, range.end - at)?;
                    if skipped > 0 {
                        at += skipped;
                    } else {
                        let geometry = state.geometry();
                        let within = geometry.offset_in_cluster(at);
                        let end = (within + (range.end - at)).min(geometry.cluster_bytes());
                        act(state, geometry.cluster_of(at), within..end)?;
                        state.commit_if_large()?;
                        at += end - within;
                    }
                    if at >= range.end {
                        break;
                    }
                }
                Ok(at)
            })?;
        }
        Ok(())
    }
}

impl Qcow2Mut {
    /// Gives every cluster its place now, so that later writes change no metadata; what is read does not change.
    ///
    /// For images without a backing file.
    pub(crate) fn preallocate(&self) -> Result<()> {
        self.announce()?;
        let mut cluster = 0;
        loop {
            cluster = self.change(|state| {
                let geometry = state.geometry();
                let end = geometry.clusters_for(state.layer.size_bytes);
                let hosts = match state.place() {
                    _ if cluster == end => {
                        state.commit()?;
                        return Ok(u64::MAX);
                    }
                    DataPlace::External => geometry.offset_of(cluster)..geometry.offset_of(end),
                    DataPlace::Inside => state.allocator.allocate(end - cluster)?,
                };
                // Data clusters must lie inside the file; they are holes, and read as zero.
                let data_end = match state.place() {
                    DataPlace::External => state.layer.size_bytes,
                    DataPlace::Inside => hosts.end,
                };
                if state.layer.data.length_bytes()? < data_end {
                    state.layer.data.set_length(data_end)?;
                }
                let count = geometry.cluster_of(hosts.end - hosts.start).min(1 << 16);
                for number in 0..count {
                    let host = hosts.start + geometry.offset_of(number);
                    let old = state.meaning(cluster + number)?;
                    state.replace(cluster + number, old, Entry::data(host, geometry), OldHost::Released)?;
                    state.commit_if_large()?;
                }
                if state.place() == DataPlace::Inside {
                    state
                        .allocator
                        .give_back(hosts.start + geometry.offset_of(count)..hosts.end)?;
                }
                Ok(cluster + count)
            })?;
            if cluster == u64::MAX {
                return Ok(());
            }
        }
    }
}

/// Whether `error` says that the metadata of this very image is damaged.
fn is_metadata_damage(error: &Error, own: &str) -> bool {
    matches!(error, Error::Corrupt { image, what, .. }
        if image == own && matches!(*what, "l2 entry" | "l2 table" | "refcount" | "refcount block" | "metadata"))
}

/// Writes the beginning of `data` where it cannot be written in place; gives the number of bytes, at least 1.
fn write_new(state: &mut State, data: &[u8], offset: u64) -> Result<usize> {
    let geometry = state.geometry();
    let within = geometry.offset_in_cluster(offset);
    let cluster = geometry.cluster_of(offset);
    if within == 0 && data.len() as u64 >= 2 * geometry.cluster_bytes() && state.place() == DataPlace::Inside {
        let count = fresh_clusters(state, cluster, data.len() as u64 / geometry.cluster_bytes())?;
        if count > 1 {
            return write_many(state, data, cluster, count);
        }
    }
    let length = (geometry.cluster_bytes() - within).min(data.len() as u64);
    write_cluster(state, cluster, within, &data[..to_usize(length)])?;
    Ok(to_usize(length))
}

/// How many clusters from `cluster` on, of one L2 table, have no host cluster that could be used again.
fn fresh_clusters(state: &State, cluster: u64, count_max: u64) -> Result<u64> {
    let entries = state.geometry().l2_entries();
    let count_max = count_max.min(entries - cluster % entries);
    let mut count = 0;
    while count < count_max {
        let meaning = state.meaning(cluster + count)?;
        if reusable_host(state, meaning, cluster + count).is_some()
            || matches!(meaning, Meaning::Data { host } if host.sharing == Sharing::Alone)
        {
            break;
        }
        count += 1;
    }
    Ok(count)
}

/// Writes whole clusters into new host clusters, as many as lie in a row.
fn write_many(state: &mut State, data: &[u8], cluster: u64, count_max: u64) -> Result<usize> {
    let geometry = state.geometry();
    let hosts = state.allocator.allocate(count_max)?;
    let length = to_usize(hosts.end - hosts.start);
    if let Err(error) = state.layer.data.write_at(&data[..length], hosts.start) {
        state.allocator.give_back(hosts)?;
        return Err(error.into());
    }
    for (number, host) in hosts.step_by(to_usize(geometry.cluster_bytes())).enumerate() {
        let cluster = cluster + number as u64;
        let old = state.meaning(cluster)?;
        state.replace(cluster, old, Entry::data(host, geometry), OldHost::Released)?;
    }
    Ok(length)
}

/// The host cluster that new data of guest cluster `cluster` goes to without an allocation.
fn reusable_host(state: &State, meaning: Meaning, cluster: u64) -> Option<Host> {
    match meaning {
        Meaning::Zero { host: Some(host) } | Meaning::Subclusters { host: Some(host), .. }
            if host.sharing == Sharing::Alone =>
        {
            Some(host)
        }
        // In a data file every cluster has its place, the same as on the disk.
        _ if state.place() == DataPlace::External => Some(Host {
            offset: state.geometry().offset_of(cluster),
            sharing: Sharing::Alone,
        }),
        _ => None,
    }
}

/// Writes `data` at `within` of guest cluster `cluster`, which has no host cluster that holds all of it.
fn write_cluster(state: &mut State, cluster: u64, within: u64, data: &[u8]) -> Result<()> {
    let old = state.meaning(cluster)?;
    refuse_shared_data_file(state, old, cluster)?;
    let reused = reusable_host(state, old, cluster);
    let plan = plan_cluster(state.geometry(), old, within..within + data.len() as u64, reused);
    let content = filled(state, cluster, within, data, &plan.written)?;
    let host = match reused {
        Some(host) => {
            state.check_data_host(host)?;
            host.offset
        }
        None => state.allocator.allocate(1)?.start,
    };
    if let Err(error) = state.layer.data.write_at(&content, host + plan.written.start) {
        if reused.is_none() {
            state
                .allocator
                .give_back(host..host + state.geometry().cluster_bytes())?;
        }
        return Err(error.into());
    }
    let entry = match state.geometry().l2_kind {
        L2Kind::Standard => Entry::data(host, state.geometry()),
        L2Kind::Extended => Entry::subclusters(host, plan.allocated, plan.zero),
    };
    let old_host = if reused.is_some() {
        OldHost::Kept
    } else {
        OldHost::Released
    };
    state.replace(cluster, old, entry, old_host)
}

/// Snapshots cannot share clusters of a data file; an entry that says so is damage.
fn refuse_shared_data_file(state: &State, meaning: Meaning, cluster: u64) -> Result<()> {
    match meaning {
        Meaning::Data { host } | Meaning::Zero { host: Some(host) } | Meaning::Subclusters { host: Some(host), .. }
            if state.place() == DataPlace::External && host.sharing == Sharing::Shared =>
        {
            Err(Error::Corrupt {
                image: state.layer.image.to_string(),
                what: "l2 entry",
                offset: host.offset,
                detail: format!("shared cluster {cluster} in an external data file"),
            })
        }
        _ => Ok(()),
    }
}

/// Which bytes of a cluster are written, and what its subclusters are afterwards.
struct ClusterPlan {
    written: Range<u64>,
    allocated: u32,
    zero: u32,
}

fn plan_cluster(geometry: Geometry, old: Meaning, touched: Range<u64>, reused: Option<Host>) -> ClusterPlan {
    let whole = 0..geometry.cluster_bytes();
    if geometry.l2_kind == L2Kind::Standard {
        return ClusterPlan {
            written: whole,
            allocated: u32::MAX,
            zero: 0,
        };
    }
    let (allocated, zero) = match old {
        Meaning::Unallocated => (0, 0),
        Meaning::Zero { .. } => (0, u32::MAX),
        Meaning::Data { .. } | Meaning::Compressed(_) => (u32::MAX, 0),
        Meaning::Subclusters { allocated, zero, .. } => (allocated, zero),
    };
    let mask = subcluster_mask(geometry, touched.clone());
    let size = geometry.subcluster_bytes();
    // What is stored elsewhere has to move along with the bytes that change.
    let written = if allocated != 0 && reused.is_none() {
        whole
    } else {
        touched.start / size * size..touched.end.next_multiple_of(size)
    };
    ClusterPlan {
        written,
        allocated: allocated | mask,
        zero: zero & !mask,
    }
}

/// The bytes `written` of guest cluster `cluster`: `data` at `within`, and around it what the disk reads now.
fn filled(state: &State, cluster: u64, within: u64, data: &[u8], written: &Range<u64>) -> Result<Vec<u8>> {
    let mut content = vec![0; to_usize(written.end - written.start)];
    if content.len() > data.len() {
        let start = state.geometry().offset_of(cluster) + written.start;
        // Bytes of the last cluster past the end of the disk are zero.
        let held = state.layer.size_bytes.saturating_sub(start).min(content.len() as u64);
        state
            .layer
            .read(&mut content[..to_usize(held)], start, Below::Backing)?;
    }
    let at = to_usize(within - written.start);
    content[at..at + data.len()].copy_from_slice(data);
    Ok(content)
}

impl State {
    /// How many bytes from `offset` on read as zero because nothing is there: no cluster, no backing file.
    fn zero_run(&self, offset: u64, length: u64) -> Result<u64> {
        if self.layer.header.is_data_file_raw() {
            return Ok(0);
        }
        let run = self.layer.mapping.run(offset, length)?;
        match run.kind {
            RunKind::Zero => Ok(run.length),
            RunKind::Absent if self.is_bottom(offset) => Ok(run.length),
            _ => Ok(0),
        }
    }

    /// Whether nothing below can show through at `offset`, and after it.
    fn is_bottom(&self, offset: u64) -> bool {
        self.layer
            .backing
            .as_ref()
            .is_none_or(|backing| backing.size_bytes() <= offset)
    }
}

/// Makes bytes `within` of guest cluster `cluster` read as zero.
fn zero_cluster(state: &mut State, cluster: u64, within: Range<u64>) -> Result<()> {
    let geometry = state.geometry();
    let start = geometry.offset_of(cluster);
    let is_whole =
        within.start == 0 && (within.end == geometry.cluster_bytes() || start + within.end == state.layer.size_bytes);
    if state.layer.header.is_data_file_raw() {
        return Ok(state.layer.data.punch(start + within.start..start + within.end)?);
    }
    let is_bottom = state.is_bottom(start);
    if is_whole && (state.layer.header.has_zero_clusters() || is_bottom) {
        return drop_cluster(state, cluster);
    }
    let size = geometry.subcluster_bytes();
    let inner = within.start.next_multiple_of(size)..within.end / size * size;
    if geometry.l2_kind == L2Kind::Extended && inner.start < inner.end {
        zero_subclusters(state, cluster, subcluster_mask(geometry, inner.clone()))?;
        write_zero_bytes(state, cluster, within.start..inner.start)?;
        return write_zero_bytes(state, cluster, inner.end..within.end);
    }
    write_zero_bytes(state, cluster, within)
}

fn zero_subclusters(state: &mut State, cluster: u64, mask: u32) -> Result<()> {
    let old = state.meaning(cluster)?;
    let (host, allocated, zero) = match old {
        Meaning::Unallocated => (None, 0, 0),
        Meaning::Zero { .. } => return Ok(()),
        Meaning::Data { host } => (Some(host), u32::MAX, 0),
        Meaning::Subclusters { host, allocated, zero } => (host, allocated, zero),
        // Compressed clusters have no subclusters: decompress by writing.
        Meaning::Compressed(_) => {
            let geometry = state.geometry();
            let first = u64::from(mask.trailing_zeros()) * geometry.subcluster_bytes();
            let length = u64::from(mask.count_ones()) * geometry.subcluster_bytes();
            return write_zero_bytes(state, cluster, first..first + length);
        }
    };
    let word = state.layer.mapping.entry(cluster)?.word;
    let bitmap = u64::from(zero | mask) << 32 | u64::from(allocated & !mask);
    debug_assert!(host.is_some() || allocated == 0, "checked when the entry was decoded");
    state.replace(cluster, old, Entry { word, bitmap }, OldHost::Kept)
}

fn write_zero_bytes(state: &mut State, cluster: u64, within: Range<u64>) -> Result<()> {
    if within.is_empty() {
        return Ok(());
    }
    let start = state.geometry().offset_of(cluster) + within.start;
    let zeroes = vec![0; to_usize(within.end - within.start)];
    match state.in_place(start, zeroes.len() as u64)? {
        Some(host) => Ok(state.layer.data.write_at(&zeroes, host.start)?),
        None => write_cluster(state, cluster, within.start, &zeroes),
    }
}

/// Makes a whole cluster read as zero and gives up its host cluster.
fn drop_cluster(state: &mut State, cluster: u64) -> Result<()> {
    let geometry = state.geometry();
    let start = geometry.offset_of(cluster);
    let old = state.meaning(cluster)?;
    let entry = if state.is_bottom(start) {
        Entry::default()
    } else {
        Entry::zero(geometry)
    };
    state.replace(cluster, old, entry, OldHost::Released)?;
    if state.place() == DataPlace::External {
        state.layer.data.punch(start..start + geometry.cluster_bytes())?;
    }
    Ok(())
}

/// Gives up a cluster that is no longer needed, unless something else would show through.
fn trim_cluster(state: &mut State, cluster: u64, within: &Range<u64>) -> Result<()> {
    let geometry = state.geometry();
    let start = geometry.offset_of(cluster);
    if state.layer.header.is_data_file_raw() {
        return Ok(state.layer.data.punch(start + within.start..start + within.end)?);
    }
    let is_whole =
        within.start == 0 && (within.end == geometry.cluster_bytes() || start + within.end == state.layer.size_bytes);
    let can_hide = state.layer.header.has_zero_clusters() || state.is_bottom(start);
    if !is_whole || !can_hide || state.meaning(cluster)? == Meaning::Unallocated {
        return Ok(());
    }
    drop_cluster(state, cluster)
}

impl BlockDevice for Qcow2Mut {
    fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> BlockResult<()> {
        self.state
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .layer
            .read_at(buffer, offset)
    }

    fn extents(&self, range: Range<u64>, extent_count_max: usize) -> BlockResult<ExtentList> {
        self.state
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .layer
            .extents(range, extent_count_max)
    }

    fn block_size_bytes(&self) -> u32 {
        self.block_size_bytes
    }
}

impl BlockDeviceMut for Qcow2Mut {
    fn write_at(&self, data: &[u8], offset: u64) -> BlockResult<()> {
        self.check_bounds(offset, data.len() as u64)?;
        Ok(self.write(data, offset)?)
    }

    fn write_zeroes(&self, range: Range<u64>) -> BlockResult<()> {
        self.check_bounds(range.start, range.end.saturating_sub(range.start))?;
        Ok(self.for_each_cluster(range, zero_cluster)?)
    }

    fn trim(&self, range: Range<u64>) -> BlockResult<()> {
        self.check_bounds(range.start, range.end.saturating_sub(range.start))?;
        Ok(self.for_each_cluster(range, |state, cluster, within| trim_cluster(state, cluster, &within))?)
    }

    fn flush(&self) -> BlockResult<()> {
        Ok(self.change(State::commit)?)
    }
}
