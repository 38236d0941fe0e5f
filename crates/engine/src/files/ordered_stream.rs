//! Writes a disk of a snapshot to a stream: several threads read ahead, one writes in order.
//!
//! Memory: one piece per result that [`OrderedResults`] queues, at most four per thread.

use std::io::Write;
use std::num::NonZero;
use std::ops::Range;

use holdfast_block::{BlockDevice, Error as DeviceError, OrderedResults, Threads, to_usize};

use crate::job::{Error, Job, Result};

const PIECE_BYTES: u64 = 1 << 20;

/// Writes all of `device` to `stream`, and flushes it.
pub(crate) fn write_to_stream(device: &dyn BlockDevice, stream: &mut dyn Write, job: Job<'_>) -> Result<()> {
    let threads = Threads {
        count: NonZero::new(job.thread_count).unwrap_or(NonZero::<usize>::MIN),
        load_max: None,
    };
    let mut read_end = 0;
    let next_piece = move || {
        let start = read_end;
        read_end = device.size_bytes().min(start + PIECE_BYTES);
        (start < read_end).then_some(start..read_end)
    };
    let read = |range: Range<u64>| {
        let mut buffer = vec![0; to_usize(range.end - range.start)];
        device.read_at(&mut buffer, range.start).map(|()| buffer)
    };
    std::thread::scope(|scope| {
        let pieces = OrderedResults::start_within(scope, threads, next_piece, || read);
        let failed_thread = |error| Error::from(DeviceError::io("read", 0, error));
        while let Some(piece) = pieces.next().map_err(failed_thread)? {
            job.interrupt.check()?;
            let bytes = piece?;
            stream.write_all(&bytes).map_err(Error::Stdout)?;
            job.progress.advance(bytes.len() as u64);
        }
        stream.flush().map_err(Error::Stdout)
    })
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
