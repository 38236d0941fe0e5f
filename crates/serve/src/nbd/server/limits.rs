//! What a server grants its clients.

use std::time::Duration;

/// Bounds on what clients can make a server spend.
///
/// The memory that they can make it hold is at most `connection_count_max` times (`request_bytes_max` + 100 MiB): a long request
/// that workers have beyond that bound, and a write and a read that are carried out on the spot, each of 32 MiB.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Connections at once; further ones are closed at once.
    pub connection_count_max: usize,
    /// How long the handshake may take, from the first byte to the last.
    pub handshake: Duration,
    /// How long a client may be silent between two requests; without it, for ever: a machine may have nothing to do for days.
    pub idle: Option<Duration>,
    /// How long a client may send nothing in the middle of a request, or take nothing of a reply.
    pub stall: Duration,
    /// Requests of one connection that workers may have at once.
    pub request_count_max: usize,
    /// Bytes of such requests and of their replies; a single request may have more.
    pub request_bytes_max: u64,
    /// Threads for slow requests, of all connections together.
    pub worker_count_max: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connection_count_max: 256,
            handshake: Duration::from_secs(30),
            idle: None,
            stall: Duration::from_secs(60),
            request_count_max: 128,
            request_bytes_max: 64 << 20,
            worker_count_max: 16,
        }
    }
}

impl Limits {
    /// How often a thread that waits for a peer looks at the clock.
    pub(crate) fn tick(&self) -> Duration {
        let shortest = self.handshake.min(self.stall).min(self.idle.unwrap_or(self.stall));
        (shortest / 4).clamp(Duration::from_millis(10), Duration::from_secs(5))
    }
}
