//! Progress display of a running job.
//!
//! The job's threads only count ([`ProgressDisplay::advance`] is one atomic addition); a separate thread draws, so that
//! a stalled job shows a falling rate instead of a frozen line.

mod rate;

use std::ops::Deref;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use holdfast_block::Clock;
use holdfast_engine::{Bottleneck, Progress, Unit};

pub use rate::RateWindow;

use super::console::Console;
use super::progress_line::{Part, ProgressLine};
use crate::process::interrupt::ProgressRequests;
use crate::process::terminal::StreamKind;
use crate::units;

/// Interval of drawing on a terminal.
const DRAW_INTERVAL: Duration = Duration::from_millis(100);
/// Interval of lines in a file.
const LOG_INTERVAL: Duration = Duration::from_secs(30);

/// Interval of JSON events.
const EVENT_INTERVAL: Duration = Duration::from_secs(1);

/// How progress is shown; messages are always shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ShowProgress {
    /// As a line.
    Line,
    /// As JSON events.
    Events,
    /// Not at all: `--quiet`, `--no-progress`.
    No,
}

/// Shows the progress of a job on a console.
pub struct ProgressDisplay {
    console: Arc<Console>,
    clock: Arc<dyn Clock>,
    show: ShowProgress,
    requests: ProgressRequests,
    part: Mutex<Option<Part>>,
    /// The start time of the job.
    start: Duration,
    done: AtomicU64,
    state: Mutex<ProgressState>,
}

#[derive(Default)]
struct ProgressState {
    phase: Option<(String, Unit)>,
    total: Option<u64>,
    rate: RateWindow,
    bottleneck: Option<Bottleneck>,
    /// The time of the next line; `None` before the first phase.
    next_line: Option<Duration>,
}

impl ProgressState {
    /// The progress of a job `elapsed` after its start; `None` before its first phase.
    fn line(&self, done: u64, part: Option<Part>, elapsed: Duration) -> Option<ProgressLine<'_>> {
        let (phase, unit) = self.phase.as_ref()?;
        Some(ProgressLine {
            part,
            phase,
            unit: *unit,
            done,
            total: self.total,
            rate: self.rate.per_second(),
            elapsed,
            left: match self.total {
                Some(total) if done >= total => Some(Duration::ZERO),
                total => total.and_then(|total| self.rate.left(total)),
            },
            bottleneck: self.bottleneck,
        })
    }
}

impl ProgressDisplay {
    /// A display that draws when [`tick`](Self::tick) is called. Status requests are answered even if no progress is
    /// shown.
    pub fn new(console: Arc<Console>, clock: Arc<dyn Clock>, show: ShowProgress, requests: ProgressRequests) -> Self {
        Self {
            console,
            start: clock.now(),
            clock,
            show,
            requests,
            part: Mutex::default(),
            done: AtomicU64::new(0),
            state: Mutex::default(),
        }
    }

    /// The same for one of several jobs.
    #[must_use]
    pub fn of_part(self, part: Option<Part>) -> Self {
        Self {
            part: Mutex::new(part),
            ..self
        }
    }

    fn current_part(&self) -> Option<Part> {
        *self.part.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Draws automatically until the returned value is dropped.
    pub fn start(self) -> RunningProgress {
        let clock = Arc::clone(&self.clock);
        let display = Arc::new(self);
        let weak = Arc::downgrade(&display);
        std::thread::spawn(move || {
            loop {
                clock.sleep(DRAW_INTERVAL);
                match weak.upgrade() {
                    Some(display) => display.tick(),
                    None => return,
                }
            }
        });
        RunningProgress { display }
    }

    /// Draws a line if it is due.
    pub fn tick(&self) {
        let now = self.clock.now();
        let done = self.done.load(Ordering::Relaxed);
        let mut state = self.lock();
        state.rate.sample(now, done);
        let elapsed = now.saturating_sub(self.start);
        if self.requests.take() {
            let line = state
                .line(done, self.current_part(), elapsed)
                .map(|line| line.in_full());
            let waiting = || format!("running for {}", units::duration(elapsed));
            self.console.answer(&line.unwrap_or_else(waiting));
        }
        if self.show == ShowProgress::No {
            return;
        }
        if state.next_line.is_none_or(|next| now < next) {
            return;
        }
        state.next_line = Some(now + self.interval());
        if let Some(line) = state.line(done, self.current_part(), elapsed) {
            self.console.progress(&line);
        }
    }

    /// Removes the line and draws no other, since the job has ended.
    fn finish(&self) {
        let mut state = self.lock();
        self.end_phase(&state);
        state.phase = None;
        self.console.clear_progress();
    }

    /// Emits the final values of each phase as an event.
    fn end_phase(&self, state: &ProgressState) {
        if self.show == ShowProgress::Events {
            let (done, elapsed) = (
                self.done.load(Ordering::Relaxed),
                self.clock.now().saturating_sub(self.start),
            );
            if let Some(line) = state.line(done, self.current_part(), elapsed) {
                self.console.progress(&line);
            }
        }
    }

    fn interval(&self) -> Duration {
        match (self.show, self.console.kind()) {
            (ShowProgress::Events, _) => EVENT_INTERVAL,
            (_, StreamKind::Terminal { .. }) => DRAW_INTERVAL,
            (_, StreamKind::File) => LOG_INTERVAL,
        }
    }

    fn lock(&self) -> MutexGuard<'_, ProgressState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Progress for ProgressDisplay {
    fn phase(&self, name: &str, unit: Unit) {
        let now = self.clock.now();
        let mut state = self.lock();
        self.end_phase(&state);
        self.done.store(0, Ordering::Relaxed);
        // Short phases must not flood a log: the time of the next line does not depend on the phase.
        let next_line = state.next_line.unwrap_or(now + self.interval());
        *state = ProgressState {
            phase: Some((name.to_owned(), unit)),
            next_line: Some(next_line),
            ..ProgressState::default()
        };
        state.rate.sample(now, 0);
    }

    fn total(&self, total: u64) {
        self.lock().total = Some(total);
    }

    fn advance(&self, amount: u64) {
        self.done.fetch_add(amount, Ordering::Relaxed);
    }

    fn part(&self, number: usize, count: usize) {
        // The previous phase belonged to another part.
        let mut state = self.lock();
        self.end_phase(&state);
        state.phase = None;
        *self.part.lock().unwrap_or_else(PoisonError::into_inner) = (count > 1).then_some(Part { number, count });
    }

    fn note(&self, message: &str) {
        self.console.note(message);
    }

    fn warning(&self, message: &str) {
        self.console.warning(message);
    }

    fn bottleneck(&self, bottleneck: Bottleneck) {
        self.lock().bottleneck = Some(bottleneck);
    }
}

/// A display that draws automatically; after it is dropped, the line is removed and no other is drawn.
///
/// Must be dropped before the report is printed; otherwise both would share a line.
pub struct RunningProgress {
    display: Arc<ProgressDisplay>,
}

impl Deref for RunningProgress {
    type Target = ProgressDisplay;

    fn deref(&self) -> &ProgressDisplay {
        &self.display
    }
}

impl Drop for RunningProgress {
    fn drop(&mut self) {
        // The drawing thread may hold the display a little longer; it must not draw again.
        self.display.finish();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use holdfast_block::{Clock, ManualClock, SystemClock};
    use holdfast_engine::{Bottleneck, Progress as _, Unit};

    use super::{Part, ProgressDisplay, ShowProgress};
    use crate::output::console::tests::{Written, console};
    use crate::output::console::{Messages, Verbosity};
    use crate::process::interrupt::ProgressRequests;
    use crate::process::terminal::StreamKind;

    fn display(kind: StreamKind, show: ShowProgress) -> (ProgressDisplay, Arc<ManualClock>, Written) {
        let clock = Arc::new(ManualClock::new());
        let (console, written) = console(kind, Verbosity::Normal);
        let requests = ProgressRequests::default();
        let display = ProgressDisplay::new(Arc::new(console), Arc::clone(&clock) as Arc<dyn Clock>, show, requests);
        (display, clock, written)
    }

    const TERMINAL: StreamKind = StreamKind::Terminal { width: 100 };

    #[test]
    fn a_terminal_shows_one_line_at_most_ten_times_a_second() {
        let (display, clock, written) = display(TERMINAL, ShowProgress::Line);
        display.tick();
        assert_eq!(written.take(), "", "no phase yet");
        display.phase("reading vda", Unit::Bytes);
        display.total(4 << 20);
        let mut drawn = 0;
        for _ in 0..100 {
            clock.advance(Duration::from_millis(20));
            display.advance(20 << 10);
            display.tick();
            drawn += usize::from(!written.take().is_empty());
        }
        assert_eq!(drawn, 20, "two seconds");
        display.bottleneck(Bottleneck::Cpu);
        clock.advance(Duration::from_millis(100));
        display.tick();
        assert_eq!(
            written.take(),
            "\rreading vda  [#########-----------]  48.8%  2.0 MiB of 4.0 MiB  952 KiB/s  3 s left\x1b[K"
        );
        display.finish();
        assert_eq!(written.take(), "\r\x1b[K");
    }

    #[test]
    fn a_file_gets_a_line_every_half_minute_however_short_the_phases() {
        let (display, clock, written) = display(StreamKind::File, ShowProgress::Line);
        let mut lines = String::new();
        for second in 0..90 {
            display.phase(&format!("phase {second}"), Unit::Items);
            display.advance(second);
            clock.advance(Duration::from_secs(1));
            display.tick();
            lines.push_str(&written.take());
        }
        assert_eq!(
            lines,
            "holdfast: phase 29  29  29/s  30 s elapsed\nholdfast: phase 59  59  59/s  1 m 0 s elapsed\nholdfast: phase 89  89  89/s  1 m 30 s elapsed\n"
        );
    }

    #[test]
    fn without_progress_messages_still_come() {
        let (display, clock, written) = display(TERMINAL, ShowProgress::No);
        display.phase("reading", Unit::Bytes);
        clock.advance(Duration::from_secs(60));
        display.tick();
        assert_eq!(written.take(), "");
        display.note("read in full: no earlier snapshot");
        display.warning("odd");
        assert_eq!(
            written.take(),
            "holdfast: read in full: no earlier snapshot\nholdfast: warning: odd\n"
        );
    }

    /// SIGUSR1 prints a full line immediately, also in a quiet program.
    #[test]
    fn a_request_is_answered_once_whatever_is_shown() {
        for (kind, show, drawn) in [
            (StreamKind::File, ShowProgress::No, ""),
            (StreamKind::File, ShowProgress::Line, ""),
            (StreamKind::Terminal { width: 20 }, ShowProgress::No, ""),
        ] {
            let (display, clock, written) = display(kind, show);
            display.requests.request();
            clock.advance(Duration::from_secs(3));
            display.tick();
            assert_eq!(written.take(), "holdfast: running for 3.0 s\n");
            display.phase("reading vda", Unit::Bytes);
            display.total(4 << 20);
            display.advance(1 << 20);
            display.requests.request();
            clock.advance(Duration::from_secs(1));
            display.tick();
            assert_eq!(
                written.take(),
                "holdfast: reading vda  25.0%  1.0 MiB of 4.0 MiB  1.0 MiB/s  4 s elapsed  3 s left\n"
            );
            display.tick();
            assert_eq!(written.take(), drawn);
        }
    }

    #[test]
    fn a_new_phase_starts_at_nothing() {
        let (display, clock, written) = display(TERMINAL, ShowProgress::Line);
        display.phase("one", Unit::Items);
        display.total(10);
        display.advance(10);
        display.phase("two", Unit::Items);
        clock.advance(Duration::from_millis(100));
        display.tick();
        assert_eq!(written.take(), "\rtwo  0\x1b[K");
    }

    #[test]
    fn what_has_ended_draws_no_more() {
        let (display, clock, written) = display(TERMINAL, ShowProgress::Line);
        display.phase("one", Unit::Items);
        clock.advance(Duration::from_secs(1));
        display.tick();
        display.finish();
        written.take();
        clock.advance(Duration::from_secs(1));
        display.tick();
        assert_eq!(written.take(), "");
    }

    /// A program with its own progress bar needs the final values of a phase, however short it was.
    #[test]
    fn events_come_every_second_and_at_the_end_of_each_phase() {
        let (console, written) = console(TERMINAL, Verbosity::Quiet);
        let console = Arc::new(console.with_messages(Messages::Events));
        let clock = Arc::new(ManualClock::new());
        let requests = ProgressRequests::default();
        let shared = Arc::clone(&clock) as Arc<dyn Clock>;
        let part = Part { number: 2, count: 3 };
        let display = ProgressDisplay::new(console, shared, ShowProgress::Events, requests).of_part(Some(part));
        display.phase("reading vda", Unit::Bytes);
        display.total(40);
        for _ in 0..25 {
            clock.advance(Duration::from_millis(100));
            display.advance(1);
            display.tick();
        }
        display.phase("writing the index", Unit::Items);
        display.advance(1);
        display.finish();
        let lines: Vec<serde_json::Value> = written
            .take()
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect();
        let seen: Vec<_> = lines
            .iter()
            .map(|line| (line["phase"].as_str().unwrap(), line["done"].as_u64().unwrap()))
            .collect();
        let expected = [
            ("reading vda", 10),
            ("reading vda", 20),
            ("reading vda", 25),
            ("writing the index", 1),
        ];
        assert_eq!(seen, expected);
        assert!(
            lines
                .iter()
                .all(|line| (&line["event"], &line["part"], &line["part_count"])
                    == (&"progress".into(), &2.into(), &3.into()))
        );
    }

    #[test]
    fn the_drawing_thread_keeps_nothing_alive() {
        let clock = Arc::new(SystemClock::new());
        let (console, _written) = console(TERMINAL, Verbosity::Normal);
        let console = Arc::new(console);
        let requests = ProgressRequests::default();
        let display = ProgressDisplay::new(Arc::clone(&console), clock, ShowProgress::Line, requests).start();
        drop(display);
        // The thread may hold the display for the duration of one drawing.
        while Arc::strong_count(&console) > 1 {
            std::thread::yield_now();
        }
    }
}
