//! Merges an overlay into its backing.
//!
//! The overlay stays valid, and is read, until the backing has all data durably; only then is the map emptied. After a
//! power cut at any time it is therefore sufficient to repeat the commit. The space of the data is released last: while
//! the stored map says data, the data must exist.

use std::sync::PoisonError;

use super::header::Header;
use super::map::{ClusterState, Map};
use super::{OverlayDevice, OverlayState};
use crate::{BlockDevice, BlockDeviceMut, Result, to_usize};

/// Size of the pieces in which data is copied.
const PIECE_BYTES: u64 = 1 << 20;

/// The result of a commit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CommitReport {
    /// Bytes copied into the backing.
    pub data_bytes: u64,
    /// Bytes zeroed in the backing.
    pub zero_bytes: u64,
}

impl<B: BlockDeviceMut, S: BlockDeviceMut> OverlayDevice<B, S> {
    /// Writes all data into the backing and empties the overlay. The content of the overlay is the same at every
    /// moment.
    ///
    /// After an error or a power cut, commit again. As soon as the first byte is written, the backing is modified, and
    /// other overlays over it become invalid. The caller is responsible for its identity.
    pub fn commit(&mut self) -> Result<CommitReport> {
        self.flush()?;
        self.set_header_state(OverlayState::Committing)?;
        let report = self.copy_into_backing()?;
        self.backing.flush()?;
        self.empty_map()?;
        self.set_header_state(OverlayState::InUse)?;
        let data = self.geometry.place_range(&(0..self.geometry.size_bytes));
        self.store.trim(data)?;
        Ok(report)
    }

    fn set_header_state(&mut self, state: OverlayState) -> Result<()> {
        let header = Header {
            geometry: self.geometry,
            backing_id: self.backing_id,
            state,
        };
        header.write(&self.store)?;
        self.store.flush()?;
        self.state = state;
        Ok(())
    }

    fn copy_into_backing(&self) -> Result<CommitReport> {
        let mut report = CommitReport::default();
        let mut buffer = Vec::new();
        let mut at = 0;
        while at < self.size_bytes() {
            let (state, end) = self.run(at, self.size_bytes());
            match state {
                ClusterState::Absent => at = end,
                ClusterState::Zero => {
                    self.backing.write_zeroes(at..end)?;
                    report.zero_bytes += end - at;
                    at = end;
                }
                ClusterState::Data => {
                    let piece = (end - at).min(PIECE_BYTES);
                    buffer.resize(to_usize(piece), 0);
                    self.store.read_at(&mut buffer, self.geometry.place(at))?;
                    self.backing.write_at(&buffer, at)?;
                    report.data_bytes += piece;
                    at += piece;
                }
            }
        }
        Ok(report)
    }

    /// Empties the stored map, then the one in memory.
    fn empty_map(&mut self) -> Result<()> {
        let map = self.map.get_mut().unwrap_or_else(PoisonError::into_inner);
        // If this fails before the end, the next flush must write the whole map again.
        map.mark_all_changed();
        self.store.write_zeroes(self.geometry.map_range())?;
        self.store.flush()?;
        *map = Map::new(self.geometry);
        Ok(())
    }
}
