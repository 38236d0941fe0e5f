//! Requests in progress, in memory that the front end keeps while a server is replaced.
//!
//! If the server is killed, QEMU connects to its successor and passes it this memory. The successor repeats the
//! requests that were taken and not completed. The layout is that of the protocol for split rings:
//!
//! | offset | bytes | field of a queue |
//! |---:|---:|---|
//! | 0 | 8 | features: the number of the server that used the queue last, and [`FLUSHED`] |
//! | 8 | 2 | version, 1; 0 in a queue that was never used |
//! | 10 | 2 | number of descriptors |
//! | 12 | 2 | head of the request that was completed last |
//! | 14 | 2 | the index of the used ring |
//! | 16 | 16 each | descriptors: in progress (1), unused (5), next completed (2), order (8) |

use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::fs::{MemfdFlags, SealFlags};
use vm_memory::{AtomicAccess, Bytes as _, MmapRegion, VolatileMemory as _};

use super::config::QUEUE_SIZE_MAX;
use super::memory::{NoMemory, map_file};

const HEADER_BYTES: usize = 16;
const DESCRIPTOR_BYTES: usize = 16;
const ALIGNMENT: usize = 64;
const VERSION: u16 = 1;

/// Set in the features while all accepted writes are durable and no server is running.
const FLUSHED: u64 = 1 << 63;

const FEATURES: usize = 0;
const VERSION_OFFSET: usize = 8;
const DESCRIPTOR_COUNT: usize = 10;
const LAST_HEAD: usize = 12;
const USED_INDEX: usize = 14;
const NEXT: usize = 6;
const ORDER: usize = 8;

/// A number that differs between servers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ServerNumber(u64);

impl ServerNumber {
    pub(super) fn new(number: u64) -> Self {
        Self(number & !FLUSHED | 1)
    }
}

/// The server that used a region last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Predecessor {
    /// None: the region is new.
    None,
    /// This server.
    Same,
    /// Another server, which has flushed all writes before it ended.
    Flushed,
    /// Another server, which may have lost writes.
    Killed,
}

/// The region of all queues.
#[derive(Clone)]
pub(super) struct InflightRegion {
    mapping: Arc<MmapRegion>,
    queue_count: u16,
    queue_size: u16,
}

/// Bytes of a queue's part.
fn queue_bytes(queue_size: u16) -> usize {
    (HEADER_BYTES + DESCRIPTOR_BYTES * usize::from(queue_size)).next_multiple_of(ALIGNMENT)
}

impl InflightRegion {
    /// Bytes for `queue_count` queues.
    pub(super) fn size_bytes(queue_count: u16, queue_size: u16) -> u64 {
        (queue_bytes(queue_size) * usize::from(queue_count)) as u64
    }

    /// Creates a region, and the file to pass to the front end.
    pub(super) fn create(queue_count: u16, queue_size: u16) -> std::io::Result<(Self, File)> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = File::from(rustix::fs::memfd_create("vhost-user-inflight", flags)?);
        let size_bytes = Self::size_bytes(queue_count, queue_size);
        file.set_len(size_bytes)?;
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let theirs = file.try_clone()?;
        let region = Self::open(file, 0, queue_count, queue_size).map_err(|error| std::io::Error::other(error.0))?;
        Ok((region, theirs))
    }

    /// Maps the region that a predecessor has created.
    pub(super) fn open(file: File, offset: u64, queue_count: u16, queue_size: u16) -> Result<Self, NoMemory> {
        if queue_count == 0 || queue_size == 0 || queue_size > QUEUE_SIZE_MAX {
            return Err(NoMemory("the region of requests in progress has no valid size"));
        }
        let mapping = map_file(file, offset, Self::size_bytes(queue_count, queue_size))?;
        Ok(Self {
            mapping: Arc::new(mapping),
            queue_count,
            queue_size,
        })
    }

    /// The part of a queue.
    pub(super) fn queue(&self, index: usize) -> Option<InflightQueue> {
        (index < usize::from(self.queue_count)).then(|| InflightQueue {
            mapping: Arc::clone(&self.mapping),
            start: queue_bytes(self.queue_size) * index,
            descriptor_count: self.queue_size,
            order: 0,
        })
    }

    fn queues(&self) -> impl Iterator<Item = InflightQueue> {
        (0..usize::from(self.queue_count)).filter_map(|index| self.queue(index))
    }

    pub(super) fn predecessor(&self, server: ServerNumber) -> Predecessor {
        let used = self.queues().filter(|queue| queue.load::<u16>(VERSION_OFFSET) != 0);
        let mut found = Predecessor::None;
        for queue in used {
            found = match queue.load::<u64>(FEATURES) {
                number if number & !FLUSHED == server.0 => Predecessor::Same,
                number if number & FLUSHED != 0 => Predecessor::Flushed,
                _ => return Predecessor::Killed,
            };
        }
        found
    }

    /// Notes that all writes are durable and that this server takes no more requests.
    pub(super) fn set_flushed(&self) {
        for queue in self.queues() {
            let features: u64 = queue.load(FEATURES);
            queue.store(features | FLUSHED, FEATURES);
        }
    }
}

/// The requests in progress of a queue. All contents may have been changed by the front end.
pub(super) struct InflightQueue {
    mapping: Arc<MmapRegion>,
    start: usize,
    descriptor_count: u16,
    /// The order of the next request.
    order: u64,
}

impl InflightQueue {
    /// All offsets are inside the mapping, so an access cannot fail.
    fn load<T: AtomicAccess + Default>(&self, offset: usize) -> T {
        let bytes = self.mapping.as_volatile_slice();
        bytes.load(self.start + offset, Ordering::SeqCst).unwrap_or_default()
    }

    fn store<T: AtomicAccess>(&self, value: T, offset: usize) {
        let bytes = self.mapping.as_volatile_slice();
        let stored = bytes.store(value, self.start + offset, Ordering::SeqCst);
        debug_assert!(stored.is_ok(), "the offset is inside the mapping");
    }

    /// The offset of a descriptor; the first one for a number outside the table, which the ring has refused before.
    fn descriptor(&self, head: u16) -> usize {
        let index = if head < self.descriptor_count { head } else { 0 };
        HEADER_BYTES + DESCRIPTOR_BYTES * usize::from(index)
    }

    /// Prepares the queue for a ring whose used index is `used_index`. Returns the heads of requests that a predecessor
    /// has taken and not completed, in their order.
    pub(super) fn begin(&mut self, ring_size: u16, used_index: u16, server: ServerNumber) -> Vec<u16> {
        let is_known = self.load::<u16>(VERSION_OFFSET) == VERSION && self.load::<u16>(DESCRIPTOR_COUNT) == ring_size;
        self.descriptor_count = self.descriptor_count.min(ring_size);
        self.store(server.0, FEATURES);
        if !is_known {
            for head in 0..self.descriptor_count {
                self.store(0u8, self.descriptor(head));
            }
            self.store(used_index, USED_INDEX);
            self.store(ring_size, DESCRIPTOR_COUNT);
            self.store(VERSION, VERSION_OFFSET);
            return Vec::new();
        }
        // The predecessor was killed after it had published completed requests in the used ring, and before it had
        // noted that.
        let mut published = used_index
            .wrapping_sub(self.load(USED_INDEX))
            .min(self.descriptor_count);
        let mut head: u16 = self.load(LAST_HEAD);
        while published > 0 && head < self.descriptor_count {
            let descriptor = self.descriptor(head);
            self.store(0u8, descriptor);
            head = self.load(descriptor + NEXT);
            published -= 1;
        }
        self.store(used_index, USED_INDEX);
        let heads = (0..self.descriptor_count).filter(|head| self.load::<u8>(self.descriptor(*head)) == 1);
        let mut ordered: Vec<(u64, u16)> = heads
            .map(|head| (self.load(self.descriptor(head) + ORDER), head))
            .collect();
        ordered.sort_unstable();
        self.order = ordered.last().map_or(0, |(order, _)| order.wrapping_add(1));
        ordered.into_iter().map(|(_, head)| head).collect()
    }

    /// A request was taken from the ring.
    pub(super) fn take(&mut self, head: u16) {
        let descriptor = self.descriptor(head);
        self.store(self.order, descriptor + ORDER);
        self.order = self.order.wrapping_add(1);
        self.store(1u8, descriptor);
    }

    /// A request is about to be published in the used ring.
    pub(super) fn complete(&self, head: u16) {
        let last: u16 = self.load(LAST_HEAD);
        self.store(last, self.descriptor(head) + NEXT);
        self.store(head, LAST_HEAD);
    }

    /// The request was published.
    pub(super) fn published(&self, head: u16, used_index: u16) {
        self.store(0u8, self.descriptor(head));
        self.store(used_index, USED_INDEX);
    }
}

#[cfg(test)]
mod tests {
    use super::{InflightRegion, Predecessor, ServerNumber};

    const FIRST: ServerNumber = ServerNumber(1);
    const SECOND: ServerNumber = ServerNumber(3);

    #[test]
    fn a_successor_repeats_requests_in_their_order_and_no_completed_ones() {
        let (region, file) = InflightRegion::create(2, 8).unwrap();
        let mut queue = region.queue(1).unwrap();
        assert_eq!(region.predecessor(FIRST), Predecessor::None);
        assert!(queue.begin(8, 65_535, FIRST).is_empty());
        for head in [5, 2, 7, 1] {
            queue.take(head);
        }
        queue.complete(2);
        queue.published(2, 0);
        // Killed before it was published.
        queue.complete(7);
        let reopened = |server| {
            let region = InflightRegion::open(file.try_clone().unwrap(), 0, 2, 8).unwrap();
            (region.predecessor(server), region.queue(1).unwrap())
        };
        let (predecessor, mut queue) = reopened(SECOND);
        assert_eq!(predecessor, Predecessor::Killed);
        assert_eq!(queue.begin(8, 0, SECOND), [5, 7, 1]);
        // Killed after it was published, and before that was noted.
        queue.complete(5);
        let (predecessor, mut queue) = reopened(SECOND);
        assert_eq!(predecessor, Predecessor::Same);
        assert_eq!(queue.begin(8, 1, SECOND), [7, 1]);
        queue.take(3);
        assert_eq!(
            reopened(SECOND).1.begin(8, 1, SECOND),
            [7, 1, 3],
            "new ones come after repeated ones"
        );
        region.set_flushed();
        assert_eq!(reopened(FIRST).0, Predecessor::Flushed);
        // A ring of another size is another ring.
        assert!(reopened(FIRST).1.begin(4, 0, FIRST).is_empty());
    }

    #[test]
    fn any_contents_are_survived() {
        use std::os::unix::fs::FileExt as _;
        let (_, file) = InflightRegion::create(1, 8).unwrap();
        let mut random = holdfast_block::SeededRandom::new(8);
        for _ in 0..500 {
            let mut bytes = vec![0; 144];
            random.fill(&mut bytes);
            bytes[8..12].copy_from_slice(&[1, 0, 8, 0]);
            file.write_all_at(&bytes, 0).unwrap();
            let region = InflightRegion::open(file.try_clone().unwrap(), 0, 1, 8).unwrap();
            let heads = region.queue(0).unwrap().begin(8, 77, FIRST);
            assert!(heads.len() <= 8 && heads.iter().all(|head| *head < 8));
        }
        assert!(
            InflightRegion::open(file.try_clone().unwrap(), 0, 2, 8).is_err(),
            "past the end"
        );
        assert!(InflightRegion::open(file, 0, 1, 0).is_err());
    }
}
