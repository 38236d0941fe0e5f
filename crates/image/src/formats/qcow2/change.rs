//! Applies a write, a zeroing or a trim to guest clusters, one after the other.
//!
//! The caller has exclusive access to the state. New data goes to a cluster without stored references; the old one is
//! released when the changed entry is durable.

use std::ops::Range;

use holdfast_block::to_usize;

use super::entry::{ClusterKind, DataLocation, HostCluster, L2Entry, Sharing};
use super::geometry::{L2Kind, Qcow2Geometry};
use super::state::{OldCluster, Qcow2State, subcluster_mask};
use crate::model::layered::{BackingUse, Layered as _};
use crate::model::mapped_extent::MappedKind;
use crate::{Error, Result};

/// Writes the beginning of `data` that cannot be written in place; returns the number of bytes, at least 1.
pub(crate) fn write_new(state: &mut Qcow2State, data: &[u8], offset: u64) -> Result<usize> {
    let geometry = state.geometry();
    let within = geometry.offset_in_cluster(offset);
    let cluster = geometry.cluster_of(offset);
    if within == 0 && data.len() as u64 >= 2 * geometry.cluster_bytes() && state.place() == DataLocation::Inside {
        let count = fresh_clusters(state, cluster, data.len() as u64 / geometry.cluster_bytes())?;
        if count > 1 {
            return write_many(state, data, cluster, count);
        }
    }
    let length = (geometry.cluster_bytes() - within).min(data.len() as u64);
    write_cluster(state, cluster, within, &data[..to_usize(length)])?;
    Ok(to_usize(length))
}

/// A host cluster for new data of `cluster` that needs no allocation.
fn fresh_clusters(state: &Qcow2State, cluster: u64, count_max: u64) -> Result<u64> {
    let entries = state.geometry().l2_entries();
    let count_max = count_max.min(entries - cluster % entries);
    let mut count = 0;
    while count < count_max {
        let meaning = state.meaning(cluster + count)?;
        if reusable_host(state, meaning, cluster + count).is_some()
            || matches!(meaning, ClusterKind::Data { host } if host.sharing == Sharing::Exclusive)
        {
            break;
        }
        count += 1;
    }
    Ok(count)
}

/// Writes whole clusters into new host clusters, as many as are adjacent.
fn write_many(state: &mut Qcow2State, data: &[u8], cluster: u64, count_max: u64) -> Result<usize> {
    let geometry = state.geometry();
    let hosts = state.allocator.allocate(count_max)?;
    let length = to_usize(hosts.end - hosts.start);
    if let Err(error) = state.layer.data.write_at(&data[..length], hosts.start) {
        state.allocator.free_unreferenced(hosts)?;
        return Err(error.into());
    }
    for (number, host) in hosts.step_by(to_usize(geometry.cluster_bytes())).enumerate() {
        let cluster = cluster + number as u64;
        let old = state.meaning(cluster)?;
        state.replace(cluster, old, L2Entry::data(host, geometry), OldCluster::Released)?;
    }
    Ok(length)
}

/// A host cluster that new data of `cluster` can go to without an allocation.
fn reusable_host(state: &Qcow2State, meaning: ClusterKind, cluster: u64) -> Option<HostCluster> {
    match meaning {
        ClusterKind::Zero { host: Some(host) } | ClusterKind::Subclusters { host: Some(host), .. }
            if host.sharing == Sharing::Exclusive =>
        {
            Some(host)
        }
        // In a data file, every cluster has the offset that it has on the disk.
        _ if state.place() == DataLocation::External => Some(HostCluster {
            offset: state.geometry().offset_of(cluster),
            sharing: Sharing::Exclusive,
        }),
        _ => None,
    }
}

/// Writes `data` at `within` of guest cluster `cluster`, which cannot be written in place.
fn write_cluster(state: &mut Qcow2State, cluster: u64, within: u64, data: &[u8]) -> Result<()> {
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
                .free_unreferenced(host..host + state.geometry().cluster_bytes())?;
        }
        return Err(error.into());
    }
    let entry = match state.geometry().l2_kind {
        L2Kind::Standard => L2Entry::data(host, state.geometry()),
        L2Kind::Extended => L2Entry::subclusters(host, plan.allocated, plan.zero),
    };
    let old_host = if reused.is_some() {
        OldCluster::Kept
    } else {
        OldCluster::Released
    };
    state.replace(cluster, old, entry, old_host)
}

/// Snapshots cannot share clusters of a data file; an entry that says so is damage.
fn refuse_shared_data_file(state: &Qcow2State, meaning: ClusterKind, cluster: u64) -> Result<()> {
    match meaning {
        ClusterKind::Data { host }
        | ClusterKind::Zero { host: Some(host) }
        | ClusterKind::Subclusters { host: Some(host), .. }
            if state.place() == DataLocation::External && host.sharing == Sharing::Shared =>
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

/// The bytes of a cluster to write, and the state of its subclusters afterwards.
struct ClusterPlan {
    written: Range<u64>,
    allocated: u32,
    zero: u32,
}

fn plan_cluster(
    geometry: Qcow2Geometry,
    old: ClusterKind,
    touched: Range<u64>,
    reused: Option<HostCluster>,
) -> ClusterPlan {
    let whole = 0..geometry.cluster_bytes();
    if geometry.l2_kind == L2Kind::Standard {
        return ClusterPlan {
            written: whole,
            allocated: u32::MAX,
            zero: 0,
        };
    }
    let (allocated, zero) = match old {
        ClusterKind::Unallocated => (0, 0),
        ClusterKind::Zero { .. } => (0, u32::MAX),
        ClusterKind::Data { .. } | ClusterKind::Compressed(_) => (u32::MAX, 0),
        ClusterKind::Subclusters { allocated, zero, .. } => (allocated, zero),
    };
    let mask = subcluster_mask(geometry, touched.clone());
    let size = geometry.subcluster_bytes();
    // Data in another host cluster moves together with the changed bytes.
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

/// The bytes `written` of guest cluster `cluster`: `data` at `within`, surrounded by the current content of the disk.
fn filled(state: &Qcow2State, cluster: u64, within: u64, data: &[u8], written: &Range<u64>) -> Result<Vec<u8>> {
    let mut content = vec![0; to_usize(written.end - written.start)];
    if content.len() > data.len() {
        let start = state.geometry().offset_of(cluster) + written.start;
        // Bytes of the last cluster past the end of the disk are zero.
        let held = state.layer.size_bytes.saturating_sub(start).min(content.len() as u64);
        state
            .layer
            .read(&mut content[..to_usize(held)], start, BackingUse::Backing)?;
    }
    let at = to_usize(within - written.start);
    content[at..at + data.len()].copy_from_slice(data);
    Ok(content)
}

impl Qcow2State {
    /// How many bytes from `offset` on read as zero because there is neither a cluster nor a backing file.
    pub(crate) fn zero_run(&self, offset: u64, length: u64) -> Result<u64> {
        if self.layer.header.is_data_file_raw() {
            return Ok(0);
        }
        let run = self.layer.mapping.run(offset, length)?;
        match run.kind {
            MappedKind::Zero => Ok(run.length),
            MappedKind::Absent if self.layer.is_bottom(offset) => Ok(run.length),
            _ => Ok(0),
        }
    }
}

/// Zeroes bytes `within` of a guest cluster.
pub(crate) fn zero_cluster(state: &mut Qcow2State, cluster: u64, within: Range<u64>) -> Result<()> {
    let geometry = state.geometry();
    let start = geometry.offset_of(cluster);
    let is_whole =
        within.start == 0 && (within.end == geometry.cluster_bytes() || start + within.end == state.layer.size_bytes);
    if state.layer.header.is_data_file_raw() {
        return Ok(state.layer.data.punch(start + within.start..start + within.end)?);
    }
    let is_bottom = state.layer.is_bottom(start);
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

fn zero_subclusters(state: &mut Qcow2State, cluster: u64, mask: u32) -> Result<()> {
    let old = state.meaning(cluster)?;
    let (host, allocated, zero) = match old {
        ClusterKind::Unallocated => (None, 0, 0),
        ClusterKind::Zero { .. } => return Ok(()),
        ClusterKind::Data { host } => (Some(host), u32::MAX, 0),
        ClusterKind::Subclusters { host, allocated, zero } => (host, allocated, zero),
        // A compressed cluster has no subclusters: replace it by an uncompressed one.
        ClusterKind::Compressed(_) => {
            let geometry = state.geometry();
            let first = u64::from(mask.trailing_zeros()) * geometry.subcluster_bytes();
            let length = u64::from(mask.count_ones()) * geometry.subcluster_bytes();
            return write_zero_bytes(state, cluster, first..first + length);
        }
    };
    let word = state.layer.mapping.entry(cluster)?.word;
    let bitmap = u64::from(zero | mask) << 32 | u64::from(allocated & !mask);
    debug_assert!(host.is_some() || allocated == 0, "checked when the entry was decoded");
    state.replace(cluster, old, L2Entry { word, bitmap }, OldCluster::Kept)
}

fn write_zero_bytes(state: &mut Qcow2State, cluster: u64, within: Range<u64>) -> Result<()> {
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

/// Zeroes a whole cluster and releases its host cluster.
fn drop_cluster(state: &mut Qcow2State, cluster: u64) -> Result<()> {
    let geometry = state.geometry();
    let start = geometry.offset_of(cluster);
    let old = state.meaning(cluster)?;
    let entry = if state.layer.is_bottom(start) {
        L2Entry::default()
    } else {
        L2Entry::zero(geometry)
    };
    state.replace(cluster, old, entry, OldCluster::Released)?;
    if state.place() == DataLocation::External {
        state.layer.data.punch(start..start + geometry.cluster_bytes())?;
    }
    Ok(())
}

/// Releases a cluster that is no longer needed, unless the backing file would be read in its place.
pub(crate) fn trim_cluster(state: &mut Qcow2State, cluster: u64, within: &Range<u64>) -> Result<()> {
    let geometry = state.geometry();
    let start = geometry.offset_of(cluster);
    if state.layer.header.is_data_file_raw() {
        return Ok(state.layer.data.punch(start + within.start..start + within.end)?);
    }
    let is_whole =
        within.start == 0 && (within.end == geometry.cluster_bytes() || start + within.end == state.layer.size_bytes);
    let can_hide = state.layer.header.has_zero_clusters() || state.layer.is_bottom(start);
    if !is_whole || !can_hide || state.meaning(cluster)? == ClusterKind::Unallocated {
        return Ok(());
    }
    drop_cluster(state, cluster)
}
