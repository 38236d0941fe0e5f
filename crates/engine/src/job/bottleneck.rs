//! Finds the bottleneck of a backup: measures where its threads wait for each other.
//!
//! All data of a backup passes through one thread, the coordinator. When the coordinator waits for readers, they either
//! wait for the source or hash. When it waits for sealers, they either compress or wait for the repository. The times
//! of these threads divide the waits of the coordinator. When the coordinator does not wait, it works, which counts as
//! processor time.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use holdfast_block::Clock;
use holdfast_repo::{Stage, StageTimer};

use crate::{Bottleneck, Progress};

/// Smallest share of the time, in percent, that makes a stage the bottleneck.
const CLEAR_PERCENT: u128 = 50;
/// Interval between reports to the listeners; shorter periods are not reported.
const REPORT_INTERVAL: Duration = Duration::from_secs(1);

/// Times of the threads of a backup, in nanoseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Times {
    wall: u64,
    /// Readers waited for the source.
    read: u64,
    /// The coordinator itself waited for the source, which is a stream.
    stream: u64,
    read_and_hash: u64,
    await_readers: u64,
    seal: u64,
    await_store: u64,
    await_sealers: u64,
    await_durable: u64,
}

impl Times {
    fn since(&self, before: &Self) -> Self {
        Self {
            wall: self.wall.saturating_sub(before.wall),
            read: self.read.saturating_sub(before.read),
            stream: self.stream.saturating_sub(before.stream),
            read_and_hash: self.read_and_hash.saturating_sub(before.read_and_hash),
            await_readers: self.await_readers.saturating_sub(before.await_readers),
            seal: self.seal.saturating_sub(before.seal),
            await_store: self.await_store.saturating_sub(before.await_store),
            await_sealers: self.await_sealers.saturating_sub(before.await_sealers),
            await_durable: self.await_durable.saturating_sub(before.await_durable),
        }
    }

    /// The stage with most of the time, if its share is large enough.
    fn bottleneck(&self) -> Option<Bottleneck> {
        let source = share(self.await_readers, self.read, self.read_and_hash) + u128::from(self.stream);
        let stuck = self.seal.saturating_add(self.await_store);
        let repository = share(self.await_sealers, self.await_store, stuck) + u128::from(self.await_durable);
        let wall = u128::from(self.wall);
        let cpu = wall.saturating_sub(source + repository);
        [
            (source, Bottleneck::Source),
            (repository, Bottleneck::Repository),
            (cpu, Bottleneck::Cpu),
        ]
        .into_iter()
        .find(|(time, _)| wall > 0 && time * 100 > wall * CLEAR_PERCENT)
        .map(|(_, bottleneck)| bottleneck)
    }
}

/// `time` scaled by `part / whole`.
fn share(time: u64, part: u64, whole: u64) -> u128 {
    match u128::from(whole) {
        0 => 0,
        whole => u128::from(time) * u128::from(part).min(whole) / whole,
    }
}

/// Measures a backup while it runs, and reports its bottleneck.
pub(crate) struct Stages<'a> {
    clock: &'a dyn Clock,
    progress: &'a dyn Progress,
    start: Duration,
    read: AtomicU64,
    stream: AtomicU64,
    spent: [AtomicU64; Stage::ALL.len()],
    /// The times at the last report.
    reported: Mutex<Times>,
}

impl<'a> Stages<'a> {
    pub(crate) fn new(clock: &'a dyn Clock, progress: &'a dyn Progress) -> Self {
        Self {
            clock,
            progress,
            start: clock.now(),
            read: AtomicU64::new(0),
            stream: AtomicU64::new(0),
            spent: Default::default(),
            reported: Mutex::default(),
        }
    }

    /// Calls `read` and counts its time as a reader's wait for the source.
    pub(crate) fn read<T>(&self, read: impl FnOnce() -> T) -> T {
        self.timed(&self.read, read)
    }

    /// Calls `read` and counts its time as the coordinator's wait for the source.
    pub(crate) fn read_stream<T>(&self, read: impl FnOnce() -> T) -> T {
        let result = self.timed(&self.stream, read);
        self.report_periodically();
        result
    }

    /// The bottleneck of the whole backup so far, if there is a clear one.
    pub(crate) fn bottleneck(&self) -> Option<Bottleneck> {
        let times = self.times();
        (u128::from(times.wall) >= REPORT_INTERVAL.as_nanos())
            .then(|| times.bottleneck())
            .flatten()
    }

    fn timed<T>(&self, counter: &AtomicU64, work: impl FnOnce() -> T) -> T {
        let start = self.clock.now();
        let result = work();
        counter.fetch_add(nanoseconds(self.clock.now().saturating_sub(start)), Ordering::Relaxed);
        result
    }

    fn times(&self) -> Times {
        let of = |stage: Stage| self.spent[stage as usize].load(Ordering::Relaxed);
        Times {
            wall: nanoseconds(self.clock.now().saturating_sub(self.start)),
            read: self.read.load(Ordering::Relaxed),
            stream: self.stream.load(Ordering::Relaxed),
            read_and_hash: of(Stage::ReadAndHash),
            await_readers: of(Stage::AwaitReaders),
            seal: of(Stage::Seal),
            await_store: of(Stage::AwaitStore),
            await_sealers: of(Stage::AwaitSealers),
            await_durable: of(Stage::AwaitDurable),
        }
    }

    fn report_periodically(&self) {
        let now = self.times();
        let mut reported = self.reported.lock().unwrap_or_else(PoisonError::into_inner);
        if u128::from(now.wall - reported.wall.min(now.wall)) < REPORT_INTERVAL.as_nanos() {
            return;
        }
        let lately = now.since(&reported);
        *reported = now;
        drop(reported);
        if let Some(bottleneck) = lately.bottleneck() {
            self.progress.bottleneck(bottleneck);
        }
    }
}

impl StageTimer for Stages<'_> {
    fn now(&self) -> Duration {
        self.clock.now()
    }

    fn spent(&self, stage: Stage, time: Duration) {
        self.spent[stage as usize].fetch_add(nanoseconds(time), Ordering::Relaxed);
        if matches!(stage, Stage::AwaitReaders | Stage::AwaitSealers | Stage::AwaitDurable) {
            self.report_periodically();
        }
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::time::Duration;

    use holdfast_block::ManualClock;
    use holdfast_repo::{Stage, StageTimer as _};

    use super::Stages;
    use crate::{Bottleneck, Progress, Unit};

    #[derive(Default)]
    struct Heard(Mutex<Vec<Bottleneck>>);

    impl Progress for Heard {
        fn phase(&self, _name: &str, _unit: Unit) {}
        fn total(&self, _total: u64) {}
        fn advance(&self, _amount: u64) {}
        fn note(&self, _message: &str) {}
        fn warning(&self, _message: &str) {}
        fn bottleneck(&self, bottleneck: Bottleneck) {
            self.0.lock().unwrap().push(bottleneck);
        }
    }

    const SECOND: Duration = Duration::from_secs(1);

    /// The bottleneck after one second with these times.
    fn verdict(read_ms: u64, spent: &[(Stage, u64)]) -> Option<Bottleneck> {
        let (clock, heard) = (ManualClock::new(), Heard::default());
        let stages = Stages::new(&clock, &heard);
        stages.read(|| clock.advance(Duration::from_millis(read_ms)));
        clock.advance(SECOND.saturating_sub(Duration::from_millis(read_ms)));
        for (stage, ms) in spent {
            stages.spent(*stage, Duration::from_millis(*ms));
        }
        stages.bottleneck()
    }

    #[test]
    fn what_the_threads_wait_for_decides() {
        // The readers only waited for the disk.
        let slow_disk = [(Stage::ReadAndHash, 950), (Stage::AwaitReaders, 800)];
        assert_eq!(verdict(900, &slow_disk), Some(Bottleneck::Source));
        // The coordinator waits for readers just as long, but they hash.
        assert_eq!(verdict(100, &slow_disk), Some(Bottleneck::Cpu));
        let slow_store = [(Stage::Seal, 100), (Stage::AwaitStore, 900), (Stage::AwaitSealers, 800)];
        assert_eq!(verdict(10, &slow_store), Some(Bottleneck::Repository));
        let compressing = [(Stage::Seal, 900), (Stage::AwaitStore, 100), (Stage::AwaitSealers, 800)];
        assert_eq!(verdict(10, &compressing), Some(Bottleneck::Cpu));
        assert_eq!(verdict(0, &[(Stage::AwaitDurable, 900)]), Some(Bottleneck::Repository));
        // No thread waited: the coordinator itself takes the time.
        assert_eq!(verdict(0, &[]), Some(Bottleneck::Cpu));
        let mixed = [
            (Stage::ReadAndHash, 400),
            (Stage::AwaitReaders, 400),
            (Stage::AwaitDurable, 300),
        ];
        assert_eq!(verdict(400, &mixed), None, "40, 30 and 30 percent");
    }

    /// The bottleneck of the last second is reported, not the average since the start.
    #[test]
    fn listeners_hear_of_the_last_second() {
        let (clock, heard) = (ManualClock::new(), Heard::default());
        let stages = Stages::new(&clock, &heard);
        for _ in 0..5 {
            stages.read_stream(|| clock.advance(SECOND));
        }
        clock.advance(SECOND);
        stages.spent(Stage::AwaitDurable, SECOND);
        let mut expected = vec![Bottleneck::Source; 5];
        expected.push(Bottleneck::Repository);
        assert_eq!(*heard.0.lock().unwrap(), expected);
        assert_eq!(stages.bottleneck(), Some(Bottleneck::Source));
    }
}
