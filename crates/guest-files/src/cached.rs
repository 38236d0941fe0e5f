//! A cache in front of a device, for readers that read a file system in small pieces.
//!
//! Blocks of 64 KiB are kept up to a bound. Misses that follow one another read ahead, up to 1 MiB at once: a snapshot
//! in a repository is read a chunk at a time, so larger requests cost fewer decompressions.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use holdfast_block::{BlockDevice, ExtentList, LruCache, Result, to_usize};

const BLOCK_BYTES: u64 = 64 << 10;
/// Most blocks of one request to the device below.
const READ_AHEAD_BLOCKS: u64 = 16;

/// A device with a cache of bounded size.
#[derive(Debug)]
pub struct CachedDevice<D> {
    device: D,
    state: Mutex<CacheState>,
}

#[derive(Debug)]
struct CacheState {
    blocks: LruCache<u64, Arc<[u8]>>,
    /// The block after the last one that was read from the device.
    expected: u64,
    /// Blocks of the next request, if it is for the expected block.
    window: u64,
}

impl<D: BlockDevice> CachedDevice<D> {
    /// Keeps at most `cache_bytes` of `device` in memory, and at least one request.
    pub fn new(device: D, cache_bytes: usize) -> Self {
        let request_bytes = to_usize(BLOCK_BYTES * READ_AHEAD_BLOCKS);
        Self {
            device,
            state: Mutex::new(CacheState {
                blocks: LruCache::new(cache_bytes.max(request_bytes)),
                expected: 0,
                window: 1,
            }),
        }
    }

    /// The bytes of a block; shorter at the end of the device.
    fn block(&self, number: u64) -> Result<Arc<[u8]>> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(block) = state.blocks.get(&number) {
            return Ok(block);
        }
        state.window = if state.expected == number {
            (state.window * 2).min(READ_AHEAD_BLOCKS)
        } else {
            1
        };
        let bytes = match self.fetch(number, state.window) {
            // An error in a later block must not fail this one.
            Err(_) if state.window > 1 => {
                state.window = 1;
                self.fetch(number, 1)?
            }
            fetched => fetched?,
        };
        let mut wanted = None;
        for (number, bytes) in (number..).zip(bytes.chunks(to_usize(BLOCK_BYTES))) {
            let block: Arc<[u8]> = bytes.into();
            wanted.get_or_insert_with(|| Arc::clone(&block));
            state.expected = number + 1;
            let length = block.len();
            state.blocks.insert(number, block, length);
        }
        Ok(wanted.unwrap_or_else(|| Arc::from(Vec::new())))
    }

    fn fetch(&self, number: u64, count: u64) -> Result<Vec<u8>> {
        let start = number * BLOCK_BYTES;
        let length = self.size_bytes().saturating_sub(start).min(count * BLOCK_BYTES);
        let mut bytes = vec![0; to_usize(length)];
        self.device.read_at(&mut bytes, start)?;
        Ok(bytes)
    }
}

impl<D: BlockDevice> BlockDevice for CachedDevice<D> {
    fn size_bytes(&self) -> u64 {
        self.device.size_bytes()
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
        self.check_bounds(offset, buffer.len() as u64)?;
        let mut rest = buffer;
        let mut at = offset;
        while !rest.is_empty() {
            let block = self.block(at / BLOCK_BYTES)?;
            let skipped = to_usize(at % BLOCK_BYTES);
            let piece = block.get(skipped..).unwrap_or_default();
            let length = piece.len().min(rest.len());
            let (now, later) = rest.split_at_mut(length);
            now.copy_from_slice(&piece[..length]);
            rest = later;
            at += length as u64;
            assert!(length > 0, "a block inside the device has bytes");
        }
        Ok(())
    }

    fn extents(&self, range: Range<u64>, extent_count_max: usize) -> Result<ExtentList> {
        self.device.extents(range, extent_count_max)
    }

    fn block_size_bytes(&self) -> u32 {
        self.device.block_size_bytes()
    }
}

#[cfg(test)]
mod tests {
    use std::ops::Range;
    use std::sync::Mutex;

    use holdfast_block::conformance::Conformance;
    use holdfast_block::{BlockDevice, ExtentList, MemoryDevice, Result};

    use super::CachedDevice;

    /// Records the requests that it receives.
    struct Counting {
        device: MemoryDevice,
        requests: Mutex<Vec<(u64, usize)>>,
    }

    impl BlockDevice for Counting {
        fn size_bytes(&self) -> u64 {
            self.device.size_bytes()
        }
        fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
            self.requests.lock().unwrap().push((offset, buffer.len()));
            self.device.read_at(buffer, offset)
        }
        fn extents(&self, range: Range<u64>, extent_count_max: usize) -> Result<ExtentList> {
            self.device.extents(range, extent_count_max)
        }
    }

    fn numbered(length: usize) -> Vec<u8> {
        (0..length).map(|at| (at / 512 % 251).to_le_bytes()[0]).collect()
    }

    #[test]
    fn small_reads_in_order_become_large_requests() {
        let bytes = numbered((4 << 20) + 1000);
        let counting = Counting {
            device: MemoryDevice::from_bytes(&bytes),
            requests: Mutex::default(),
        };
        let cached = CachedDevice::new(&counting, 8 << 20);
        let mut read = Vec::new();
        for chunk in bytes.chunks(4096) {
            let mut buffer = vec![0; chunk.len()];
            cached.read_at(&mut buffer, read.len() as u64).unwrap();
            read.extend_from_slice(&buffer);
        }
        assert!(read == bytes, "the bytes differ");
        let requests = counting.requests.lock().unwrap().clone();
        assert!(requests.len() < 12, "{requests:?}");
        assert_eq!(requests.iter().map(|(_, length)| length).sum::<usize>(), bytes.len());
    }

    #[test]
    fn random_reads_fetch_one_block_and_repeated_ones_nothing() {
        let bytes = numbered(2 << 20);
        let counting = Counting {
            device: MemoryDevice::from_bytes(&bytes),
            requests: Mutex::default(),
        };
        let cached = CachedDevice::new(&counting, 2 << 20);
        let mut buffer = [0; 100];
        for offset in [1_000_000, 300_000, 1_000_000, 300_100] {
            cached.read_at(&mut buffer, offset).unwrap();
        }
        let requests = counting.requests.lock().unwrap().clone();
        assert_eq!(requests, [(15 * 65_536, 65_536), (4 * 65_536, 65_536)]);
    }

    #[test]
    fn the_cache_is_a_device() {
        let bytes = numbered(300_000);
        let cached = CachedDevice::new(MemoryDevice::from_bytes(&bytes), 0);
        Conformance::new().check_read_only(&cached, &bytes);
    }
}
