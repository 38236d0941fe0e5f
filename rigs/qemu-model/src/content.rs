//! Reads and writes through nodes.

use std::os::unix::fs::FileExt as _;

use holdfast_block::to_usize;

use crate::node::{CLUSTER_BYTES, Driver};
use crate::state::State;

/// Result of reading or writing.
type IoResult<T> = std::io::Result<T>;

impl State {
    pub(crate) fn read(&self, name: &str, buffer: &mut [u8], offset: u64) -> IoResult<()> {
        let node = self.nodes.get(name).ok_or_else(gone)?;
        match &node.driver {
            Driver::File(file) => read_sparse(file, buffer, offset),
            Driver::Qcow2(bytes) => {
                let start = to_usize(offset);
                let found = bytes.get(start..start + buffer.len()).ok_or_else(gone)?;
                buffer.copy_from_slice(found);
                Ok(())
            }
            Driver::NullCo => {
                buffer.fill(0);
                Ok(())
            }
            Driver::Raw | Driver::CopyBeforeWrite(_) => self.read(node.child("file").ok_or_else(gone)?, buffer, offset),
            Driver::SnapshotAccess => self.read_saved(node.child("file").ok_or_else(gone)?, buffer, offset),
        }
    }

    /// Reads a disk as it was when the filter was inserted.
    fn read_saved(&self, filter: &str, buffer: &mut [u8], offset: u64) -> IoResult<()> {
        let node = self.nodes.get(filter).ok_or_else(gone)?;
        let Driver::CopyBeforeWrite(clusters) = &node.driver else {
            // The filter of a job lies in between: it reads like the node below it.
            return self.read(filter, buffer, offset);
        };
        let (source, target) = (node.child("file"), node.child("target"));
        let (source, target) = (source.ok_or_else(gone)?, target.ok_or_else(gone)?);
        let mut done = 0;
        while done < buffer.len() {
            let at = offset + done as u64;
            let cluster = at / CLUSTER_BYTES;
            let length = to_usize((cluster + 1) * CLUSTER_BYTES - at).min(buffer.len() - done);
            let holder = if clusters.saved.contains(&cluster) {
                target
            } else {
                source
            };
            self.read(holder, &mut buffer[done..done + length], at)?;
            done += length;
        }
        Ok(())
    }

    /// Writes through a node, like a guest through the node of its device.
    pub(crate) fn write(&mut self, name: &str, bytes: &[u8], offset: u64) -> IoResult<()> {
        self.save_before_write(name, offset, bytes.len() as u64)?;
        let node = self.nodes.get_mut(name).ok_or_else(gone)?;
        node.mark(offset, bytes.len() as u64);
        match &mut node.driver {
            Driver::File(file) => file.write_all_at(bytes, offset),
            Driver::Qcow2(content) => {
                let start = to_usize(offset);
                let place = content.get_mut(start..start + bytes.len()).ok_or_else(gone)?;
                place.copy_from_slice(bytes);
                Ok(())
            }
            Driver::NullCo => Ok(()),
            Driver::SnapshotAccess => Err(std::io::Error::from(std::io::ErrorKind::PermissionDenied)),
            Driver::Raw | Driver::CopyBeforeWrite(_) => {
                let below = node.child("file").ok_or_else(gone)?.to_owned();
                self.write(&below, bytes, offset)
            }
        }
    }

    fn save_before_write(&mut self, name: &str, offset: u64, length: u64) -> IoResult<()> {
        let node = self.nodes.get(name).ok_or_else(gone)?;
        let Driver::CopyBeforeWrite(clusters) = &node.driver else {
            return Ok(());
        };
        let source = node.child("file").ok_or_else(gone)?.to_owned();
        let target = node.child("target").ok_or_else(gone)?.to_owned();
        let end = (offset + length).div_ceil(CLUSTER_BYTES);
        let is_new = |cluster: &u64| !clusters.saved.contains(cluster) && !clusters.discarded.contains(cluster);
        let new: Vec<u64> = (offset / CLUSTER_BYTES..end).filter(is_new).collect();
        let size_bytes = node.size_bytes;
        for cluster in new {
            let start = cluster * CLUSTER_BYTES;
            let mut old = vec![0; to_usize(CLUSTER_BYTES.min(size_bytes - start))];
            self.read(&source, &mut old, start)?;
            self.write(&target, &old, start)?;
            if let Some(Driver::CopyBeforeWrite(clusters)) = self.nodes.get_mut(name).map(|node| &mut node.driver) {
                clusters.saved.insert(cluster);
            }
        }
        Ok(())
    }

    /// Discards through a snapshot: a discarded cluster is no longer saved.
    pub(crate) fn discard(&mut self, name: &str, offset: u64, length: u64) -> IoResult<()> {
        let node = self.nodes.get_mut(name).ok_or_else(gone)?;
        node.mark(offset, length);
        let below = node.child("file").map(str::to_owned);
        let filter = below.and_then(|below| self.nodes.get_mut(&below));
        if let Some(Driver::CopyBeforeWrite(clusters)) = filter.map(|filter| &mut filter.driver) {
            let whole = offset.div_ceil(CLUSTER_BYTES)..(offset + length) / CLUSTER_BYTES;
            clusters.discarded.extend(whole);
        }
        Ok(())
    }
}

/// Reads a file; bytes after its end are zero.
fn read_sparse(file: &std::fs::File, buffer: &mut [u8], offset: u64) -> IoResult<()> {
    let mut done = 0;
    while done < buffer.len() {
        match file.read_at(&mut buffer[done..], offset + done as u64)? {
            0 => {
                buffer[done..].fill(0);
                break;
            }
            count => done += count,
        }
    }
    Ok(())
}

pub(crate) fn gone() -> std::io::Error {
    std::io::Error::other("the node is gone")
}
