//! Limits on clients.

use std::time::Duration;

/// Limits on the resources that clients can use.
///
/// Memory for requests is at most `memory_bytes_max`, plus `connection_count_max` times 6 MiB for buffers and small
/// requests (an iSCSI session has up to 80 of 64 KiB). A connection may always have one small request of [`SMALL_BYTES`](Self::SMALL_BYTES).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Concurrent connections; further ones are closed at once.
    pub connection_count_max: usize,
    /// Concurrent connections from one network address.
    pub address_connection_count_max: usize,
    /// Concurrent handshakes; a further handshake replaces the oldest one.
    pub handshake_count_max: usize,
    /// Time limit of the handshake.
    pub handshake: Duration,
    /// Time that a client may be idle between two requests; unlimited if `None`, because a machine may be idle for
    /// days.
    pub idle: Option<Duration>,
    /// Time that a client may pause in the middle of a request or of a reply.
    pub stall: Duration,
    /// Number of requests of one connection that workers may have at a time.
    pub request_count_max: usize,
    /// Bytes of such requests and of their replies; a single request may exceed this limit.
    pub request_bytes_max: u64,
    /// Bytes of requests and of their replies, of all connections; a single request may exceed this limit.
    pub memory_bytes_max: u64,
    /// Threads for slow requests, shared by all connections.
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
    /// The maximum size of a small request.
    pub const SMALL_BYTES: u64 = 128 << 10;

    /// Interval at which a thread that waits for a peer checks the clock.
    pub(crate) fn tick(&self) -> Duration {
        let shortest = self.handshake.min(self.stall).min(self.idle.unwrap_or(self.stall));
        (shortest / 4).clamp(Duration::from_millis(10), Duration::from_secs(5))
    }
}
