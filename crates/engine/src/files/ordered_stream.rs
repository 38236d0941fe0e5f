//! A disk of a snapshot as a stream of bytes: several threads read ahead, one writes in order.
//!
//! Memory: a mebibyte for each piece on its way, of which there are a few for each thread.

use std::collections::VecDeque;
use std::io::Write;
use std::ops::Range;
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::sync::{Mutex, PoisonError};

use holdfast_block::{BlockDevice, to_usize};

use crate::job::{Error, Job, Result};

const PIECE_BYTES: u64 = 1 << 20;
/// Pieces on their way for each thread: one that is read and one that waits to be written.
const PIECES_PER_THREAD: usize = 2;

type Bytes = holdfast_block::Result<Vec<u8>>;

/// A piece to be read, and where its content is sent.
struct RequestedPiece {
    range: Range<u64>,
    answer: SyncSender<Bytes>,
}

/// Writes all of `device` to `stream`, and flushes it.
pub(crate) fn write_to_stream(device: &dyn BlockDevice, stream: &mut dyn Write, job: Job<'_>) -> Result<()> {
    let (send, wanted) = channel();
    let wanted = Mutex::new(wanted);
    std::thread::scope(|scope| {
        for _ in 0..job.thread_count.max(1) {
            scope.spawn(|| read_ahead(device, &wanted));
        }
        let written = write_in_order(device.size_bytes(), &send, stream, job);
        // Readers end when no request can come any more.
        drop(send);
        written
    })?;
    stream.flush().map_err(Error::Stdout)
}

fn read_ahead(device: &dyn BlockDevice, wanted: &Mutex<Receiver<RequestedPiece>>) {
    loop {
        let next = wanted.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(RequestedPiece { range, answer }) = next else {
            return;
        };
        let mut buffer = vec![0; to_usize(range.end - range.start)];
        let read = device.read_at(&mut buffer, range.start).map(|()| buffer);
        // The writer may have stopped.
        answer.send(read).ok();
    }
}

fn write_in_order(size_bytes: u64, send: &Sender<RequestedPiece>, stream: &mut dyn Write, job: Job<'_>) -> Result<()> {
    let mut on_the_way: VecDeque<Receiver<Bytes>> = VecDeque::new();
    let mut asked = 0;
    loop {
        while asked < size_bytes && on_the_way.len() < job.thread_count.max(1) * PIECES_PER_THREAD {
            let range = asked..size_bytes.min(asked + PIECE_BYTES);
            asked = range.end;
            let (answer, piece) = sync_channel(1);
            send.send(RequestedPiece { range, answer })
                .expect("readers wait until the sender is gone");
            on_the_way.push_back(piece);
        }
        let Some(piece) = on_the_way.pop_front() else {
            return Ok(());
        };
        job.interrupt.check()?;
        let bytes = piece.recv().expect("a reader answers what it took")?;
        stream.write_all(&bytes).map_err(Error::Stdout)?;
        job.progress.advance(bytes.len() as u64);
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use holdfast_block::{BlockDevice as _, ManualClock, MemoryDevice, SeededRandom};

    use super::write_to_stream;
    use crate::job::{Error, Interrupt, Job, NoProgress};

    fn with_job<T>(thread_count: usize, interrupt: &Interrupt, run: impl FnOnce(Job<'_>) -> T) -> T {
        let clock = ManualClock::new();
        run(Job {
            progress: &NoProgress,
            interrupt,
            clock: &clock,
            thread_count,
        })
    }

    #[test]
    fn every_byte_comes_once_and_in_order() {
        let interrupt = Interrupt::new();
        for size in [0, 1, 1 << 20, (9 << 20) + 5] {
            let mut bytes = vec![0; size];
            SeededRandom::new(size as u64).fill(&mut bytes);
            let device = MemoryDevice::from_bytes(&bytes);
            for thread_count in [0, 1, 3] {
                let mut stream = Vec::new();
                with_job(thread_count, &interrupt, |job| {
                    write_to_stream(&device, &mut stream, job)
                })
                .unwrap();
                assert!(stream == bytes, "{size} bytes, {thread_count} threads");
            }
        }
    }

    /// The reader of a pipe is closed, or the job is interrupted.
    #[test]
    fn it_stops_when_the_stream_fails_and_when_it_is_asked_to() {
        struct Full(u64);
        impl Write for Full {
            fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
                self.0 = self
                    .0
                    .checked_sub(bytes.len() as u64)
                    .ok_or(std::io::ErrorKind::StorageFull)?;
                Ok(bytes.len())
            }
            fn flush(&mut self) -> std::io::Result<()> {
                Ok(())
            }
        }
        let device = MemoryDevice::new(9 << 20);
        let interrupt = Interrupt::new();
        let failed = with_job(2, &interrupt, |job| write_to_stream(&device, &mut Full(3 << 20), job));
        assert!(matches!(failed, Err(Error::Stdout(_))));
        interrupt.request();
        let stopped = with_job(2, &interrupt, |job| {
            write_to_stream(&device, &mut Full(device.size_bytes()), job)
        });
        assert!(matches!(stopped, Err(Error::Interrupted(_))));
    }
}
