//! Ctrl-C: the first asks the job to stop at its next step, the second ends the program at once. SIGUSR1 asks how far it is.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use holdfast_engine::Interrupt;
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

/// Whether whoever started us has a signal ignored, as proc(5) tells; nothing is where it cannot be read.
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

/// Ends the program by `signal`, as if it had never been caught; comes back only where that is impossible.
///
/// A shell whose loop runs the program stops the loop only when it sees that the signal has ended the program.
pub fn end_by(signal: i32) -> std::io::Result<()> {
    low_level::emulate_default_handler(signal)
}
