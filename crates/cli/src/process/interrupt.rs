//! Ctrl-C: the first asks the job to stop at its next step, the second ends the program at once. SIGUSR1 asks how far it is.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use std::time::Duration;

use holdfast_block::Clock;
use holdfast_engine::Interrupt;
use holdfast_host::{NotedWait, WaitKind, waits_under_way};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook::{flag, low_level};

/// Signals that have become requests to stop.
#[derive(Debug, Clone)]
pub struct Listener {
    interrupt: Interrupt,
    signal: Arc<AtomicUsize>,
}

/// Connects SIGINT, SIGTERM and SIGHUP with a request to stop, which long jobs look at.
///
/// To be called when the job begins, after the password has been asked for: until then a signal ends the program as
/// usual. A signal that comes when the request is already there does what it does by default, which is to kill.
/// Where SIGHUP is ignored it stays so: `nohup` wants that.
pub fn listen() -> std::io::Result<Listener> {
    let interrupt = Interrupt::new();
    let last = Arc::new(AtomicUsize::new(0));
    let signals = [SIGINT, SIGTERM]
        .into_iter()
        .chain((!is_ignored(SIGHUP)).then_some(SIGHUP));
    for signal in signals {
        // Order matters: the first action must see the flag as it was before this signal.
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

/// Requests to say how far the job is, which SIGUSR1 makes.
#[derive(Debug, Clone, Default)]
pub struct ProgressRequests {
    is_pending: Arc<AtomicBool>,
}

impl ProgressRequests {
    /// Makes a request, as the signal does.
    pub fn request(&self) {
        self.is_pending.store(true, Ordering::Relaxed);
    }

    /// Takes a request, if there is one.
    pub fn take(&self) -> bool {
        self.is_pending.swap(false, Ordering::Relaxed)
    }
}

/// Connects SIGUSR1 with requests for progress, and keeps SIGUSR2 from ending the program: backup programs use both for
/// questions, and by default each of them kills.
///
/// To be called when the program begins. Programs that it starts do not inherit this.
pub fn hear_questions() -> std::io::Result<ProgressRequests> {
    let requests = ProgressRequests::default();
    flag::register(SIGUSR1, Arc::clone(&requests.is_pending))?;
    flag::register(SIGUSR2, Arc::default())?;
    Ok(requests)
}

/// Whether the parent process ignores a signal, by proc(5); false where that cannot be read.
fn is_ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|digits| u64::from_str_radix(digits.trim(), 16).ok());
    mask.is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
}

impl Listener {
    /// The request to stop.
    pub fn interrupt(&self) -> &Interrupt {
        &self.interrupt
    }

    /// The signal that came, if one did.
    pub fn signal(&self) -> Option<i32> {
        i32::try_from(self.signal.load(Ordering::Relaxed))
            .ok()
            .filter(|&signal| signal != 0)
    }
}

/// How often it is looked whether a wait keeps a job from stopping.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);
/// How long one may still last that was under way when the job was asked to stop.
const GRACE: Duration = Duration::from_millis(900);
/// How long one may last that began after that, to clear up; and a piece of work.
const LONG_GRACE: Duration = Duration::from_secs(5);

/// What keeps a job from stopping that was asked to: waits which nothing but the end of the program ends.
#[derive(Debug, Default)]
struct Stuck {
    first_seen: BTreeMap<u64, Duration>,
    asked_at: Option<Duration>,
}

impl Stuck {
    /// Looks at what is waited for at `now`. The job was asked to stop before; gives a wait that lasts too long.
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

/// Ends the program by the signal that requested the stop, where a call that does not return keeps it from ending by itself. `tell` reports
/// which service does not answer.
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

/// Ends the program by `signal`, as if it had never been caught; comes back only where that is impossible.
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
