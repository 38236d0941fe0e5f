//! A disk that is served to the other host.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};

use holdfast_block::{BlockDevice, ExtentList, Result};

/// A disk whose image is opened again while it is served. Its size stays the same.
pub(super) struct ServedDisk {
    size_bytes: u64,
    device: RwLock<Arc<dyn BlockDevice>>,
    read_bytes: AtomicU64,
}

impl ServedDisk {
    pub(super) fn new(device: Arc<dyn BlockDevice>) -> Self {
        Self {
            size_bytes: device.size_bytes(),
            device: RwLock::new(device),
            read_bytes: AtomicU64::new(0),
        }
    }

    /// Serves `device` from now on. No read of the former one is answered afterwards.
    pub(super) fn switch(&self, device: Arc<dyn BlockDevice>) {
        *self.device.write().unwrap_or_else(PoisonError::into_inner) = device;
    }

    /// Bytes that were read.
    pub(super) fn read_bytes(&self) -> u64 {
        self.read_bytes.load(Ordering::Relaxed)
    }

    fn device(&self) -> RwLockReadGuard<'_, Arc<dyn BlockDevice>> {
        self.device.read().unwrap_or_else(PoisonError::into_inner)
    }
}

impl BlockDevice for ServedDisk {
    fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
        self.device().read_at(buffer, offset)?;
        self.read_bytes.fetch_add(buffer.len() as u64, Ordering::Relaxed);
        Ok(())
    }

    fn extents(&self, range: Range<u64>, extent_count_max: usize) -> Result<ExtentList> {
        self.device().extents(range, extent_count_max)
    }

    fn block_size_bytes(&self) -> u32 {
        self.device().block_size_bytes()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use holdfast_block::{BlockDevice as _, BlockDeviceMut as _, MemoryDevice};

    use super::ServedDisk;

    #[test]
    fn reads_come_from_the_last_device_and_are_counted() {
        let filled = |byte| {
            let device = MemoryDevice::new(4096);
            device.write_at(&[byte; 4096], 0).unwrap();
            Arc::new(device)
        };
        let disk = ServedDisk::new(filled(1));
        let mut buffer = [0; 512];
        disk.read_at(&mut buffer, 0).unwrap();
        assert_eq!(buffer, [1; 512]);
        disk.switch(filled(2));
        disk.read_at(&mut buffer, 512).unwrap();
        assert_eq!((buffer, disk.read_bytes()), ([2; 512], 1024));
        disk.read_at(&mut buffer, 4096).unwrap_err();
        assert_eq!(disk.read_bytes(), 1024);
    }
}
