//! What a server grants its clients.

use std::time::Duration;

/// Bounds on what clients can make a server spend.
///
/// The memory that they can make it hold is at most `memory_bytes_max` for requests, and `connection_count_max` times 5 MiB for buffers and
/// small requests. A connection may have one small request of [`SMALL_BYTES`](Self::SMALL_BYTES) whatever the others have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Connections at once; further ones are closed at once.
    pub connection_count_max: usize,
    /// Connections at once from one address of the network.
    pub address_connection_count_max: usize,
    /// Connections in the middle of the handshake; a further one takes the place of the oldest of them.
    pub handshake_count_max: usize,
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
    /// Bytes of requests and of their replies, of all connections together; a single request may have more.
    pub memory_bytes_max: u64,
    /// Threads for slow requests, of all connections together.
    pub worker_count_max: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connection_count_max: 256,
            address_connection_count_max: 128,
            handshake_count_max: 64,
            handshake: Duration::from_secs(30),
            idle: None,
            stall: Duration::from_secs(60),
            request_count_max: 128,
            request_bytes_max: 64 << 20,
            memory_bytes_max: 512 << 20,
            worker_count_max: 16,
        }
    }
}

impl Limits {
    /// A request of so many bytes is small.
    pub const SMALL_BYTES: u64 = 128 << 10;

    /// How often a thread that waits for a peer looks at the clock.
    pub(crate) fn tick(&self) -> Duration {
        let shortest = self.handshake.min(self.stall).min(self.idle.unwrap_or(self.stall));
        (shortest / 4).clamp(Duration::from_millis(10), Duration::from_secs(5))
    }
}
