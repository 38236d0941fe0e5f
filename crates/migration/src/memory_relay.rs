//! The relay of a machine's memory. It holds the last bytes back until the disks are complete at the other host.
//!
//! ```text
//! QEMU here ──► PATH here ──► relay ──► socket that ssh forwards ──► PATH there ──► QEMU there
//!           ◄──────────────────────────────────────────────────────────────────
//! ```
//!
//! QEMU stops the machine, sends the rest of its memory and the state of its devices, and waits for an answer. While the end
//! is missing, the other QEMU does not answer, and the machine runs nowhere. Everything else is forwarded at once: QEMU
//! measures the bandwidth to decide when to stop the machine. The opposite direction is not delayed.

use std::io::{Read as _, Write as _};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use holdfast_live_copy::SendRate;
use rustix::event::{PollFd, PollFlags};

use crate::streams::{forward_bytes, wait_for_any};

/// Bytes that are held back. QEMU's stream ends with a mark of one byte, and a description of the devices follows.
const HELD_BYTES: usize = 4096;
const PIECE_BYTES: usize = 256 << 10;

/// How a relay has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RelayEnd {
    /// Everything was forwarded.
    Opened,
    /// The stream was broken before its end.
    Broken,
}

/// What the thread that owns a relay wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RelayOrder {
    Open,
    Break,
}

/// A relay for one stream of memory. Dropping it breaks the stream, unless it was opened.
pub struct MemoryRelay {
    path: PathBuf,
    /// Wakes the relay up: an order is in `order`.
    wake: UnixStream,
    order: Arc<Mutex<Option<RelayOrder>>>,
    /// Both ends of the stream, once it exists.
    streams: Arc<Mutex<Vec<UnixStream>>>,
    sent_bytes: Arc<AtomicU64>,
    relay: Option<JoinHandle<RelayEnd>>,
}

impl MemoryRelay {
    /// Listens at the new socket `path`. The first connection to it is relayed to the socket `onward`, at this rate.
    pub fn listen(path: &Path, onward: &Path, rate: Arc<SendRate>) -> std::io::Result<Self> {
        let listener = UnixListener::bind(path)?;
        let (wake, woken) = UnixStream::pair()?;
        let order: Arc<Mutex<Option<RelayOrder>>> = Arc::default();
        let streams: Arc<Mutex<Vec<UnixStream>>> = Arc::default();
        let sent_bytes: Arc<AtomicU64> = Arc::default();
        let relay = RelayThread {
            listener,
            woken,
            onward: onward.to_owned(),
            rate,
            order: Arc::clone(&order),
            streams: Arc::clone(&streams),
            sent_bytes: Arc::clone(&sent_bytes),
        };
        let relay = std::thread::Builder::new()
            .name("memory-relay".to_owned())
            .spawn(move || relay.run())?;
        Ok(Self {
            path: path.to_owned(),
            wake,
            order,
            streams,
            sent_bytes,
            relay: Some(relay),
        })
    }

    /// Forwards the held bytes, and everything that follows.
    pub fn open(&self) {
        self.give(RelayOrder::Open);
    }

    /// Breaks the stream: the machine resumes at the sender. Without effect after [`open`](Self::open).
    pub fn break_off(&self) {
        self.give(RelayOrder::Break);
    }

    fn give(&self, order: RelayOrder) {
        let first = *locked(&self.order).get_or_insert(order);
        if first == RelayOrder::Break {
            // The relay may be waiting until the other side takes what it sends.
            for stream in &*locked(&self.streams) {
                stream.shutdown(Shutdown::Both).ok();
            }
        }
        // If the relay has ended, it needs no orders.
        (&self.wake).write_all(&[1]).ok();
    }

    /// Bytes of memory that were received.
    pub fn sent_bytes(&self) -> u64 {
        self.sent_bytes.load(Ordering::Relaxed)
    }

    /// Waits for the end of the stream.
    pub fn wait(mut self) -> RelayEnd {
        self.end()
    }

    fn end(&mut self) -> RelayEnd {
        let relay = self.relay.take();
        relay.map_or(RelayEnd::Broken, |relay| relay.join().unwrap_or(RelayEnd::Broken))
    }
}

impl Drop for MemoryRelay {
    fn drop(&mut self) {
        self.break_off();
        self.end();
        std::fs::remove_file(&self.path).ok();
    }
}

/// The thread of a relay.
struct RelayThread {
    listener: UnixListener,
    woken: UnixStream,
    onward: PathBuf,
    rate: Arc<SendRate>,
    order: Arc<Mutex<Option<RelayOrder>>>,
    streams: Arc<Mutex<Vec<UnixStream>>>,
    sent_bytes: Arc<AtomicU64>,
}

/// What a relay waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ready {
    Stream,
    Order,
}

impl RelayThread {
    fn run(self) -> RelayEnd {
        match wait_for(&self.listener, &self.woken) {
            Ok(Ready::Stream) => {}
            Ok(Ready::Order) | Err(_) => return RelayEnd::Broken,
        }
        let Ok((from, _)) = self.listener.accept() else {
            return RelayEnd::Broken;
        };
        let Ok(to) = UnixStream::connect(&self.onward) else {
            return RelayEnd::Broken;
        };
        let ends = [from.try_clone(), to.try_clone()].into_iter().flatten();
        locked(&self.streams).extend(ends);
        let back = match (to.try_clone(), from.try_clone()) {
            (Ok(source), Ok(target)) => std::thread::spawn(move || forward_bytes(&source, &target)),
            _ => return RelayEnd::Broken,
        };
        let end = self.relay(&from, &to).unwrap_or(RelayEnd::Broken);
        if end == RelayEnd::Broken {
            from.shutdown(Shutdown::Both).ok();
            to.shutdown(Shutdown::Both).ok();
        } else {
            to.shutdown(Shutdown::Write).ok();
        }
        back.join().ok();
        end
    }

    fn relay(&self, mut from: &UnixStream, mut to: &UnixStream) -> std::io::Result<RelayEnd> {
        let mut piece = vec![0; HELD_BYTES + PIECE_BYTES];
        // The bytes at the beginning of `piece` that were received and not sent.
        let mut held_count = 0;
        loop {
            if wait_for(from, &self.woken)? == Ready::Order {
                break;
            }
            let count = from.read(&mut piece[held_count..])?;
            if count == 0 {
                // The end without an order: QEMU gave up, or a small machine has sent everything.
                wait_for_order(&self.woken)?;
                break;
            }
            self.sent_bytes.fetch_add(count as u64, Ordering::Relaxed);
            let end = held_count + count;
            let free = end.saturating_sub(HELD_BYTES);
            for part in piece[..free].chunks(self.rate.piece_bytes(free)) {
                self.rate.pass(part.len(), &|| locked(&self.order).is_some());
                to.write_all(part)?;
            }
            piece.copy_within(free..end, 0);
            held_count = end - free;
        }
        let order = *locked(&self.order);
        if order != Some(RelayOrder::Open) {
            return Ok(RelayEnd::Broken);
        }
        to.write_all(&piece[..held_count])?;
        let rest = std::io::copy(&mut from, &mut to)?;
        self.sent_bytes.fetch_add(rest, Ordering::Relaxed);
        Ok(RelayEnd::Opened)
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits until `stream` can be read or an order was given. An order comes first.
fn wait_for(stream: &impl std::os::fd::AsFd, woken: &UnixStream) -> std::io::Result<Ready> {
    let mut waited = [PollFd::new(stream, PollFlags::IN), PollFd::new(woken, PollFlags::IN)];
    wait_for_any(&mut waited)?;
    let has_order = !waited[1].revents().is_empty();
    Ok(if has_order { Ready::Order } else { Ready::Stream })
}

fn wait_for_order(mut woken: &UnixStream) -> std::io::Result<()> {
    woken.read_exact(&mut [0])
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::net::Shutdown;
    use std::num::NonZeroU64;
    use std::os::unix::net::{UnixListener, UnixStream};
    use std::sync::Arc;
    use std::time::Duration;

    use holdfast_block::{Clock as _, SystemClock};
    use holdfast_live_copy::SendRate;

    use super::{HELD_BYTES, MemoryRelay, RelayEnd};

    fn unlimited() -> Arc<SendRate> {
        Arc::new(SendRate::unlimited(Arc::new(SystemClock::new())))
    }

    /// Both ends of a stream through a relay.
    struct Ends {
        relay: MemoryRelay,
        sender: UnixStream,
        receiver: UnixStream,
        _folder: tempfile::TempDir,
    }

    fn connected() -> Ends {
        connected_at(unlimited())
    }

    fn connected_at(rate: Arc<SendRate>) -> Ends {
        let folder = tempfile::tempdir().unwrap();
        let (here, there) = (folder.path().join("here"), folder.path().join("there"));
        let listener = UnixListener::bind(&there).unwrap();
        let relay = MemoryRelay::listen(&here, &there, rate).unwrap();
        let sender = UnixStream::connect(&here).unwrap();
        let (receiver, _) = listener.accept().unwrap();
        receiver.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
        Ends {
            relay,
            sender,
            receiver,
            _folder: folder,
        }
    }

    fn pattern(length: usize) -> Vec<u8> {
        (0..=250_u8).cycle().take(length).collect()
    }

    /// Everything that arrives within the time limit.
    fn arrived(mut receiver: &UnixStream) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut piece = vec![0; 65_536];
        while let Ok(count @ 1..) = receiver.read(&mut piece) {
            bytes.extend(&piece[..count]);
        }
        bytes
    }

    /// Whether nothing more arrives. A stream whose bytes were not read ends with an error.
    fn has_ended(mut stream: &UnixStream) -> bool {
        !matches!(stream.read(&mut [0]), Ok(1..))
    }

    #[test]
    fn memory_is_sent_within_the_limit_until_it_is_lifted() {
        let clock = Arc::new(SystemClock::new());
        let at_most = |bytes_per_s| Arc::new(SendRate::at_most(NonZeroU64::new(bytes_per_s), clock.clone()));
        let mut ends = connected_at(at_most(1_000_000));
        let begun = clock.now();
        let receiver = ends.receiver.try_clone().unwrap();
        let reader = std::thread::spawn(move || arrived(&receiver).len());
        ends.sender.write_all(&pattern(400_000)).unwrap();
        assert_eq!(reader.join().unwrap(), 400_000 - HELD_BYTES);
        assert!(clock.now() > begun + Duration::from_millis(300));

        let slow = at_most(1);
        let mut ends = connected_at(Arc::clone(&slow));
        ends.sender.write_all(&pattern(100_000)).unwrap();
        assert!(arrived(&ends.receiver).len() <= 32 << 10);
        let _lifted = slow.lift();
        assert!(arrived(&ends.receiver).len() > 48 << 10);
    }

    #[test]
    fn an_order_does_not_wait_for_the_limit() {
        let slow = SendRate::at_most(NonZeroU64::new(1), Arc::new(SystemClock::new()));
        let mut ends = connected_at(Arc::new(slow));
        ends.sender.write_all(&pattern(100_000)).unwrap();
        arrived(&ends.receiver);
        ends.relay.break_off();
        assert_eq!(ends.relay.wait(), RelayEnd::Broken);
    }

    #[test]
    fn the_last_bytes_wait_for_the_order_to_open() {
        let mut ends = connected();
        let bytes = pattern(1 << 20);
        let receiver = ends.receiver.try_clone().unwrap();
        let reader = std::thread::spawn(move || arrived(&receiver));
        ends.sender.write_all(&bytes).unwrap();
        let before = reader.join().unwrap();
        assert_eq!(before.len(), bytes.len() - HELD_BYTES);
        // The opposite direction is not held.
        ends.receiver.write_all(b"answer").unwrap();
        let mut answer = [0; 6];
        ends.sender.read_exact(&mut answer).unwrap();
        assert_eq!(&answer, b"answer");
        ends.relay.open();
        ends.sender.write_all(b"more").unwrap();
        let after = arrived(&ends.receiver);
        assert!([&before[..], &after].concat() == [&bytes[..], b"more"].concat());
        ends.sender.shutdown(Shutdown::Write).unwrap();
        drop(ends.receiver);
        assert_eq!(ends.relay.wait(), RelayEnd::Opened);
    }

    #[test]
    fn a_broken_stream_ends_for_both_sides_without_its_end() {
        for is_ended in [false, true] {
            let mut ends = connected();
            ends.sender.write_all(&pattern(10_000)).unwrap();
            if is_ended {
                ends.sender.shutdown(Shutdown::Write).unwrap();
            }
            assert_eq!(arrived(&ends.receiver).len(), 10_000 - HELD_BYTES);
            ends.relay.break_off();
            ends.relay.open();
            assert_eq!(arrived(&ends.receiver).len(), 0);
            assert!(has_ended(&ends.sender));
            assert_eq!(ends.relay.wait(), RelayEnd::Broken);
        }
    }

    #[test]
    fn a_relay_that_is_dropped_breaks_the_stream() {
        let mut ends = connected();
        ends.sender.write_all(&pattern(100)).unwrap();
        drop(ends.relay);
        assert_eq!(arrived(&ends.receiver).len(), 0);
        assert!(has_ended(&ends.sender));
        let folder = tempfile::tempdir().unwrap();
        let unused =
            MemoryRelay::listen(&folder.path().join("here"), &folder.path().join("there"), unlimited()).unwrap();
        drop(unused);
        assert!(!folder.path().join("here").exists());
    }
}
