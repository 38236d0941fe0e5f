//! Ctrl-C: the first requests a stop at the job's next step, the second ends the program immediately. SIGUSR1 requests
//! the progress.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use std::time::Duration;

use holdfast_block::Clock;
use holdfast_engine::Interrupt;
use holdfast_host::{NotedWait, WaitKind, waits_under_way};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook::{flag, low_level};

/// Signals that were turned into stop requests.
#[derive(Debug, Clone)]
pub struct Listener {
    interrupt: Interrupt,
    signal: Arc<AtomicUsize>,
}

/// Turns SIGINT, SIGTERM and SIGHUP into a stop request, which long jobs check.
///
/// To be called when the job begins, after the password prompt: until then a signal ends the program as usual. A
/// signal after the first request has its default effect, which is to kill. An ignored SIGHUP stays ignored, as
/// `nohup` requires.
pub fn listen() -> std::io::Result<Listener> {
    let interrupt = Interrupt::new();
    let last = Arc::new(AtomicUsize::new(0));
    let signals = [SIGINT, SIGTERM]
        .into_iter()
        .chain((!is_ignored(SIGHUP)).then_some(SIGHUP));
    for signal in signals {
        // Order matters: the first action must see the flag's value before this signal.
        flag::register_conditional_default(signal, interrupt.flag())?;
        let number = usize::try_from(signal).expect("numbers of signals are positive");
        flag::register_usize(signal, Arc::clone(&last), number)?;
        flag::register(signal, interrupt.flag())?;
    }
    Ok(Listener {
        interrupt,
        signal: last,
    })
}

/// Requests for progress, made by SIGUSR1.
#[derive(Debug, Clone, Default)]
pub struct ProgressRequests {
    is_pending: Arc<AtomicBool>,
}

impl ProgressRequests {
    /// Makes a request, as the signal would.
    pub fn request(&self) {
        self.is_pending.store(true, Ordering::Relaxed);
    }

    /// Removes and returns whether there is a request.
    pub fn take(&self) -> bool {
        self.is_pending.swap(false, Ordering::Relaxed)
    }
}

/// Turns SIGUSR1 into requests for progress, and ignores SIGUSR2: backup programs use both signals for status requests,
/// and the default action of each is to kill.
///
/// To be called when the program starts. Child processes do not inherit this.
pub fn hear_questions() -> std::io::Result<ProgressRequests> {
    let requests = ProgressRequests::default();
    flag::register(SIGUSR1, Arc::clone(&requests.is_pending))?;
    flag::register(SIGUSR2, Arc::default())?;
    Ok(requests)
}

/// Whether the parent process set the signal to be ignored, by proc(5); false if that cannot be read.
fn is_ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|digits| u64::from_str_radix(digits.trim(), 16).ok());
    mask.is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
}

impl Listener {
    /// The stop request.
    pub fn interrupt(&self) -> &Interrupt {
        &self.interrupt
    }

    /// The received signal, if any.
    pub fn signal(&self) -> Option<i32> {
        i32::try_from(self.signal.load(Ordering::Relaxed))
            .ok()
            .filter(|&signal| signal != 0)
    }
}

/// How often to check whether a blocked wait prevents a job from stopping.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);
/// How much longer a wait may last that was already in progress at the stop request.
const GRACE: Duration = Duration::from_millis(900);
/// How long a wait for cleaning up, or a piece of work, may last after the stop request.
const LONG_GRACE: Duration = Duration::from_secs(5);

/// Detects what prevents a job from stopping: waits that only the end of the program ends.
#[derive(Debug, Default)]
struct Stuck {
    first_seen: BTreeMap<u64, Duration>,
    asked_at: Option<Duration>,
}

impl Stuck {
    /// Checks the waits at time `now`, after the stop request; returns one that lasts too long.
    fn look(&mut self, waits: &[(u64, NotedWait)], now: Duration) -> Option<NotedWait> {
        let asked_at = *self.asked_at.get_or_insert(now);
        self.first_seen
            .retain(|number, _| waits.iter().any(|(found, _)| found == number));
        let mut too_long = waits.iter().filter(|(number, wait)| {
            let since = *self.first_seen.entry(*number).or_insert(now);
            let grace = match wait.kind {
                WaitKind::Answer if since == asked_at => GRACE,
                WaitKind::Answer | WaitKind::Work => LONG_GRACE,
            };
            now.saturating_sub(since) >= grace
        });
        too_long.next().map(|(_, wait)| *wait)
    }
}

/// Ends the program by the signal that requested the stop, if a blocking call prevents it from ending by itself. `tell`
/// reports which service does not respond.
pub fn end_when_stuck(
    listener: &Listener,
    clock: Arc<dyn Clock>,
    tell: impl Fn(&str) + Send + 'static,
) -> std::io::Result<()> {
    let listener = listener.clone();
    let watch = move || {
        let mut stuck = Stuck::default();
        loop {
            clock.sleep(LOOK_INTERVAL);
            if !listener.interrupt.is_requested() {
                continue;
            }
            if let (Some(wait), Some(signal)) = (stuck.look(&waits_under_way(), clock.now()), listener.signal()) {
                tell(wait.peer);
                end_by(signal).ok();
            }
        }
    };
    std::thread::Builder::new()
        .name("stop".to_owned())
        .spawn(watch)
        .map(drop)
}

/// Ends the program by `signal`, as if it had never been caught; returns only if that is impossible.
///
/// A shell whose loop runs the program stops the loop only when it sees that the signal has ended the program.
pub fn end_by(signal: i32) -> std::io::Result<()> {
    low_level::emulate_default_handler(signal)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use holdfast_host::{NotedWait, WaitKind};

    use super::Stuck;

    const ANSWER: NotedWait = NotedWait {
        peer: "libvirt",
        kind: WaitKind::Answer,
    };
    const WORK: NotedWait = NotedWait {
        peer: "a program",
        kind: WaitKind::Work,
    };

    fn first_too_long(stuck: &mut Stuck, waits: &[(u64, NotedWait)], from_ms: u64) -> u64 {
        let ticks = (0..100).map(|tick| from_ms + tick * 100);
        let too_long = |now_ms: &u64| stuck.look(waits, Duration::from_millis(*now_ms)).is_some();
        ticks.into_iter().find(too_long).unwrap() - from_ms
    }

    #[test]
    fn a_wait_for_an_answer_at_the_request_ends_within_a_second() {
        assert!(first_too_long(&mut Stuck::default(), &[(7, ANSWER)], 300) < 1000);
        assert!(first_too_long(&mut Stuck::default(), &[(7, WORK)], 300) >= 5000);
    }

    #[test]
    fn what_clears_up_has_longer_and_each_wait_its_own_time() {
        let mut stuck = Stuck::default();
        for number in 0..30 {
            let now = Duration::from_millis(200 * number);
            assert_eq!(stuck.look(&[(number, ANSWER)], now), None, "{number}");
        }
        assert!(first_too_long(&mut stuck, &[(99, ANSWER)], 6000) >= 5000);
    }
}
