//! Where a request is carried out: by the thread that received it, or by a worker.
//!
//! Handing a request to another thread and waking that costs more than a read that is answered from memory. But while the
//! receiving thread is busy, everything else on its connection waits. No device says in advance which read will be slow, so it
//! is measured: requests of one class go to workers until enough of them in a row were quick, and are then carried out on the
//! spot until some are slow again. One slow read may hence hold up its own connection; the next does not.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use super::request::{Command, Durability, Request};

/// What a request may take, and still be quick: this, and [`NANOSECONDS_PER_BYTE`].
const QUICK: Duration = Duration::from_micros(250);
/// 256 MiB/s: memory is ten times quicker, storage that is slower is worth another thread.
const NANOSECONDS_PER_BYTE: u64 = 4;
/// So many times slower than quick says enough at once; what is less may have been the machine's business with others.
const BLATANT: u32 = 20;

/// Above this, requests go to workers. Each quick request takes 1 off.
const TOLERATED: u32 = 32;
const SUSPICION_PER_SLOW: u32 = 32;
const SUSPICION_MAX: u32 = 96;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    OnTheSpot,
    Worker,
}

/// What was learned of one connection's export, per class of requests.
#[derive(Debug)]
pub(crate) struct Pace {
    reads: AtomicU32,
    writes: AtomicU32,
    /// Those that have to reach the medium.
    durable: AtomicU32,
    others: AtomicU32,
}

impl Pace {
    pub(crate) fn new() -> Self {
        let suspicious = || AtomicU32::new(TOLERATED + SUSPICION_PER_SLOW);
        Self {
            reads: suspicious(),
            writes: suspicious(),
            durable: suspicious(),
            others: suspicious(),
        }
    }

    fn class(&self, request: &Request) -> &AtomicU32 {
        match request.command {
            Command::Flush => &self.durable,
            _ if request.durability == Durability::BeforeReply => &self.durable,
            Command::Read(_) => &self.reads,
            Command::Write => &self.writes,
            Command::Trim | Command::Cache | Command::WriteZeroes(_) | Command::BlockStatus { .. } => &self.others,
        }
    }

    pub(crate) fn place(&self, request: &Request) -> Place {
        // Relaxed: a count of the past, and nothing else is read because of it.
        if self.class(request).load(Ordering::Relaxed) > TOLERATED {
            Place::Worker
        } else {
            Place::OnTheSpot
        }
    }

    /// Takes note of how long a request took.
    pub(crate) fn learn(&self, request: &Request, took: Duration) {
        let bytes = match request.command {
            Command::Read(_) | Command::Write => request.length,
            _ => 0,
        };
        let quick = QUICK + Duration::from_nanos(bytes.saturating_mul(NANOSECONDS_PER_BYTE));
        let class = self.class(request);
        let before = class.load(Ordering::Relaxed);
        let after = if took <= quick {
            before.saturating_sub(1)
        } else if took > quick * BLATANT {
            SUSPICION_MAX
        } else {
            (before + SUSPICION_PER_SLOW).min(SUSPICION_MAX)
        };
        if after != before {
            class.store(after, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::request::{Command, Durability, Fragments, Request};
    use super::{Pace, Place};

    const fn request(command: Command, durability: Durability) -> Request {
        Request {
            cookie: 0,
            offset: 0,
            length: 4096,
            command,
            durability,
        }
    }

    const READ: Request = request(Command::Read(Fragments::Any), Durability::Later);
    const QUICK: Duration = Duration::from_micros(20);

    #[test]
    fn quick_requests_are_carried_out_on_the_spot_after_they_proved_it() {
        let pace = Pace::new();
        for _ in 0..32 {
            assert_eq!(pace.place(&READ), Place::Worker);
            pace.learn(&READ, QUICK);
        }
        assert_eq!(pace.place(&READ), Place::OnTheSpot);
        let flush = request(Command::Flush, Durability::Later);
        let durable = request(Command::Write, Durability::BeforeReply);
        for other in [flush, durable, request(Command::Trim, Durability::Later)] {
            assert_eq!(pace.place(&other), Place::Worker, "{other:?} proved nothing");
        }
    }

    #[test]
    fn one_hiccup_is_tolerated_two_are_not_and_a_blatant_one_is_not() {
        let proven = || {
            let pace = Pace::new();
            (0..64).for_each(|_| pace.learn(&READ, QUICK));
            pace
        };
        let pace = proven();
        pace.learn(&READ, Duration::from_millis(1));
        assert_eq!(pace.place(&READ), Place::OnTheSpot);
        pace.learn(&READ, Duration::from_millis(1));
        assert_eq!(pace.place(&READ), Place::Worker);
        let pace = proven();
        pace.learn(&READ, Duration::from_millis(10));
        assert_eq!(pace.place(&READ), Place::Worker);
        let large = Request {
            length: 1 << 20,
            ..READ
        };
        let pace = proven();
        (0..9).for_each(|_| pace.learn(&large, Duration::from_millis(3)));
        assert_eq!(pace.place(&large), Place::OnTheSpot, "a large request may take longer");
    }
}
