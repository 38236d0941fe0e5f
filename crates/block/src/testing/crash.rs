//! Records the writes to a device, and computes what the device may contain after a power cut.
//!
//! The model of a disk: a sector of 512 bytes is written completely or not at all. Writes before a flush that returned
//! are durable. Of all later writes, any subset of sectors may have been written, in any order. So a sector that was
//! written several times since the flush may have any of these contents, or the durable one.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::testing::fault::sector_pieces;
use crate::{BlockDevice, BlockDeviceMut, ExtentList, MemoryDevice, Result, SeededRandom, to_usize};

/// A completed change of a device, or a flush.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Change {
    Write { offset: u64, data: Vec<u8> },
    Zeroes(Range<u64>),
    Flush,
}

/// The changes of a [`CrashLogDevice`] since it was created.
#[derive(Debug)]
pub struct CrashLog {
    initial: Vec<u8>,
    changes: Mutex<Vec<Change>>,
}

impl CrashLog {
    fn lock(&self) -> MutexGuard<'_, Vec<Change>> {
        self.changes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Number of writes, zeroings, trims and flushes so far.
    pub fn change_count(&self) -> usize {
        self.lock().len()
    }

    /// A content that the device may have after a power cut, when the first `change_count` changes had been requested.
    /// The seed chooses which of the sectors that were not durable were written.
    ///
    /// A flush among these changes has returned. All changes since the last flush may have been written only partly.
    pub fn crash_image(&self, change_count: usize, seed: u64) -> MemoryDevice {
        let changes = self.lock();
        let asked = &changes[..change_count];
        let durable = asked
            .iter()
            .rposition(|change| *change == Change::Flush)
            .map_or(0, |flush| flush + 1);
        let mut random = SeededRandom::new(seed);
        let keep_one_in = 1 + random.below(4);
        let mut latest = self.initial.clone();
        let mut image = self.initial.clone();
        for (number, change) in asked.iter().enumerate() {
            let Some(range) = change.apply(&mut latest) else {
                continue;
            };
            for (sector, length) in sector_pieces(range.start / 512 * 512, range.end - range.start / 512 * 512) {
                if number < durable || random.one_in(keep_one_in) {
                    // A sector is written as a whole, including the effect of earlier changes on its other bytes.
                    let end = to_usize(sector + length).next_multiple_of(512).min(image.len());
                    let whole = to_usize(sector)..end;
                    image[whole.clone()].copy_from_slice(&latest[whole]);
                }
            }
        }
        MemoryDevice::from_bytes(&image)
    }
}

impl Change {
    /// Applies the whole change, and returns the changed range.
    fn apply(&self, image: &mut [u8]) -> Option<Range<u64>> {
        match self {
            Self::Write { offset, data } => {
                let start = to_usize(*offset);
                image[start..start + data.len()].copy_from_slice(data);
                Some(*offset..offset + data.len() as u64)
            }
            Self::Zeroes(range) => {
                image[to_usize(range.start)..to_usize(range.end)].fill(0);
                Some(range.clone())
            }
            Self::Flush => None,
        }
    }
}

/// A device in memory that logs every change.
///
/// A request is executed and logged under one lock, so that the log has the order of execution.
#[derive(Debug)]
pub struct CrashLogDevice {
    device: MemoryDevice,
    log: Arc<CrashLog>,
}

impl CrashLogDevice {
    /// A device with the content of `device`, which counts as durable.
    pub fn new(device: MemoryDevice) -> Self {
        let log = Arc::new(CrashLog {
            initial: device.to_bytes(),
            changes: Mutex::default(),
        });
        Self { device, log }
    }

    /// The log, which stays valid after the device is dropped.
    pub fn log(&self) -> Arc<CrashLog> {
        self.log.clone()
    }

    fn change(&self, change: Change, act: impl FnOnce() -> Result<()>) -> Result<()> {
        let mut changes = self.log.lock();
        act()?;
        changes.push(change);
        Ok(())
    }
}

impl BlockDevice for CrashLogDevice {
    fn size_bytes(&self) -> u64 {
        self.device.size_bytes()
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
        self.device.read_at(buffer, offset)
    }

    fn extents(&self, range: Range<u64>, extent_count_max: usize) -> Result<ExtentList> {
        self.device.extents(range, extent_count_max)
    }
}

impl BlockDeviceMut for CrashLogDevice {
    fn write_at(&self, data: &[u8], offset: u64) -> Result<()> {
        let change = Change::Write {
            offset,
            data: data.to_vec(),
        };
        self.change(change, || self.device.write_at(data, offset))
    }

    fn write_zeroes(&self, range: Range<u64>) -> Result<()> {
        let end = range.end.max(range.start);
        self.change(Change::Zeroes(range.start..end), || self.device.write_zeroes(range))
    }

    fn trim(&self, range: Range<u64>) -> Result<()> {
        self.write_zeroes(range)
    }

    fn flush(&self) -> Result<()> {
        self.change(Change::Flush, || self.device.flush())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::CrashLogDevice;
    use crate::testing::conformance::Conformance;
    use crate::{BlockDeviceMut, MemoryDevice};

    #[test]
    fn conforms() {
        Conformance::new()
            .with_operation_count(50)
            .check_mutable(|size| CrashLogDevice::new(MemoryDevice::new(size)));
    }

    #[test]
    fn flushed_sectors_stay_and_every_mixture_of_the_others_happens() {
        let device = CrashLogDevice::new(MemoryDevice::from_bytes(&[9; 2048]));
        device.write_at(&[1; 512], 0).unwrap();
        device.flush().unwrap();
        device.write_at(&[2; 1024], 512).unwrap();
        device.write_zeroes(512..1024).unwrap();
        device.write_at(&[3; 512], 1536).unwrap();
        let log = device.log();
        assert_eq!(log.change_count(), 5);

        let states = |at: usize| -> BTreeSet<[u8; 4]> {
            (0..500)
                .map(|seed| {
                    let bytes = log.crash_image(at, seed).to_bytes();
                    assert!(
                        bytes
                            .chunks(512)
                            .all(|sector| sector.iter().all(|byte| *byte == sector[0]))
                    );
                    [bytes[0], bytes[512], bytes[1024], bytes[1536]]
                })
                .collect()
        };
        assert_eq!(states(0), [[9, 9, 9, 9]].into());
        assert_eq!(states(2), [[1, 9, 9, 9]].into());
        assert_eq!(states(1), [[1, 9, 9, 9], [9, 9, 9, 9]].into());
        let after: BTreeSet<[u8; 4]> = states(5);
        let expected: BTreeSet<[u8; 4]> = [0, 2, 9]
            .into_iter()
            .flat_map(|a| [2, 9].into_iter().flat_map(move |b| [3, 9].map(|c| [1, a, b, c])))
            .collect();
        assert_eq!(after, expected);
    }
}
