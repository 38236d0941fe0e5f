//! The replies to send on one connection, and its amount of work in progress.
//!
//! A thread that finds the socket free sends all ready replies in one call, so replies that become ready meanwhile are
//! sent together. Workers never wait for a peer: if the socket is full, a separate thread of the connection sends the
//! rest.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::net::Shutdown;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use super::budget::Lease;
use crate::stream::{SocketStream, Wait};

/// Limit of buffers of one call; the system allows 1024.
const PIECE_COUNT_MAX: usize = 64;

/// The cost of a request that a worker has: the bytes of its payload or of the data to read, and its lease of the
/// shared budget.
#[derive(Debug)]
pub(crate) struct RequestCost {
    pub(crate) bytes: u64,
    #[expect(dead_code, reason = "dropped when the reply was sent")]
    pub(crate) lease: Option<Lease>,
}

/// Limits on the requests of one connection that workers may have at once.
#[derive(Debug, Clone, Copy)]
pub(crate) struct WorkerQuota {
    pub(crate) request_count_max: usize,
    pub(crate) bytes_max: u64,
}

#[derive(Debug)]
pub(crate) struct Outbox<B> {
    stream: Arc<SocketStream>,
    quota: WorkerQuota,
    state: Mutex<PendingReplies<B>>,
    changed: Condvar,
}

#[derive(Debug)]
struct PendingReplies<B> {
    /// Replies of workers.
    ready: VecDeque<(B, RequestCost)>,
    /// Whether a thread is sending.
    is_sending: bool,
    /// Whether the connection cannot send any more.
    is_dead: bool,
    /// Requests that workers have, or whose replies were not sent yet.
    request_count: usize,
    bytes: u64,
}

/// Replies that are being sent.
struct Batch<B> {
    replies: Vec<(B, RequestCost)>,
    /// Number of bytes of the batch that were sent.
    sent: usize,
}

impl<B: AsRef<[u8]> + Default + Send + 'static> Outbox<B> {
    pub(crate) fn new(stream: Arc<SocketStream>, quota: WorkerQuota) -> Self {
        Self {
            stream,
            quota,
            state: Mutex::new(PendingReplies {
                ready: VecDeque::new(),
                is_sending: false,
                is_dead: false,
                request_count: 0,
                bytes: 0,
            }),
            changed: Condvar::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, PendingReplies<B>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, PendingReplies<B>>) -> MutexGuard<'a, PendingReplies<B>> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether another request may be given to a worker now.
    pub(crate) fn has_room(&self, bytes: u64) -> bool {
        self.fits(&self.lock(), bytes)
    }

    fn fits(&self, state: &PendingReplies<B>, bytes: u64) -> bool {
        state.request_count == 0
            || (state.request_count < self.quota.request_count_max && state.bytes + bytes <= self.quota.bytes_max)
    }

    /// Waits for quota, and counts a request that is given to a worker. Returns the number of requests including this
    /// one.
    pub(crate) fn admit(&self, bytes: u64) -> usize {
        let mut state = self.lock();
        while !self.fits(&state, bytes) {
            state = self.wait(state);
        }
        state.request_count += 1;
        state.bytes += bytes;
        state.request_count
    }

    /// Waits until workers have no request of this connection, and all replies were sent.
    pub(crate) fn wait_until_empty(&self) {
        let mut state = self.lock();
        while state.request_count > 0 || state.is_sending {
            state = self.wait(state);
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.lock().request_count == 0
    }

    pub(crate) fn is_dead(&self) -> bool {
        self.lock().is_dead
    }

    /// Sends `own`, the replies of the receiving thread, and the replies of workers; waits for the peer if necessary.
    pub(crate) fn send(&self, own: &[u8]) -> io::Result<()> {
        let mut state = self.lock();
        while state.is_sending {
            state = self.wait(state);
        }
        if state.is_dead {
            self.discard(&mut state);
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        state.is_sending = true;
        let mut batch = Batch::take(&mut state);
        drop(state);
        let mut rest = own;
        loop {
            match batch.send(&mut rest, &self.stream, Wait::ForPeer) {
                Ok(()) => {}
                Err(error) => {
                    self.finish(&batch, Some(&error));
                    return Err(error);
                }
            }
            match self.finish(&batch, None) {
                Some(more) => batch = more,
                None => return Ok(()),
            }
        }
    }

    /// Queues the reply of a worker, and sends it unless another thread is about to send.
    pub(crate) fn deliver(self: &Arc<Self>, reply: B, cost: RequestCost) {
        self.push(reply, cost);
        self.send_ready();
    }

    /// Queues the reply of a request that was admitted. Replies are sent in the order of the calls, by the next
    /// [`send_ready`](Self::send_ready) or [`send`](Self::send).
    pub(crate) fn push(&self, reply: B, cost: RequestCost) {
        self.lock().ready.push_back((reply, cost));
    }

    /// Queues a reply of the receiving thread, which needs no quota. The lease is returned when the reply was sent.
    pub(crate) fn push_own(&self, reply: B, lease: Option<Lease>) {
        let mut state = self.lock();
        state.request_count += 1;
        state.ready.push_back((reply, RequestCost { bytes: 0, lease }));
    }

    /// Sends the queued replies without waiting for the peer, unless another thread is sending.
    pub(crate) fn send_ready(self: &Arc<Self>) {
        let mut state = self.lock();
        if state.is_sending || state.ready.is_empty() {
            return;
        }
        state.is_sending = true;
        let batch = Batch::take(&mut state);
        drop(state);
        self.send_batches(batch);
    }

    /// Closes the connection, because a request will have no reply.
    pub(crate) fn abort(self: &Arc<Self>, cost: RequestCost) {
        self.stream.shut_down(Shutdown::Both);
        self.lock().is_dead = true;
        self.deliver(B::default(), cost);
    }

    /// Sends without waiting. If the socket is full, starts a thread that waits.
    fn send_batches(self: &Arc<Self>, mut batch: Batch<B>) {
        loop {
            let sent = if self.is_dead() {
                Err(io::ErrorKind::BrokenPipe.into())
            } else {
                batch.send(&mut &[][..], &self.stream, Wait::Not)
            };
            match sent {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    let outbox = Arc::clone(self);
                    let thread = std::thread::Builder::new().name("serve-sender".to_owned());
                    // If no thread can be started, this connection is closed, rather than blocking a worker.
                    let slot = Arc::new(Mutex::new(Some(batch)));
                    let theirs = Arc::clone(&slot);
                    let spawned = thread.spawn(move || {
                        let batch = theirs.lock().unwrap_or_else(PoisonError::into_inner).take();
                        if let Some(batch) = batch {
                            outbox.send_blocking(batch);
                        }
                    });
                    if let Err(error) = spawned
                        && let Some(batch) = slot.lock().unwrap_or_else(PoisonError::into_inner).take()
                    {
                        self.finish(&batch, Some(&error));
                    }
                    return;
                }
                sent => match self.finish(&batch, sent.err().as_ref()) {
                    Some(more) => batch = more,
                    None => return,
                },
            }
        }
    }

    fn send_blocking(&self, mut batch: Batch<B>) {
        loop {
            let sent = batch.send(&mut &[][..], &self.stream, Wait::ForPeer);
            match self.finish(&batch, sent.err().as_ref()) {
                Some(more) => batch = more,
                None => return,
            }
        }
    }

    /// Releases the quota of a batch that was sent or cannot be sent. Returns the replies that became ready meanwhile;
    /// if there are none, the socket is free for other threads.
    fn finish(&self, batch: &Batch<B>, error: Option<&io::Error>) -> Option<Batch<B>> {
        let mut state = self.lock();
        state.request_count -= batch.replies.len();
        state.bytes -= batch.replies.iter().map(|(_, cost)| cost.bytes).sum::<u64>();
        if error.is_some() {
            state.is_dead = true;
            self.stream.shut_down(Shutdown::Both);
        }
        if !state.is_dead && !state.ready.is_empty() {
            self.changed.notify_all();
            return Some(Batch::take(&mut state));
        }
        state.is_sending = false;
        self.discard(&mut state);
        None
    }

    /// Discards the queued replies: replies that cannot be delivered any more need no quota.
    fn discard(&self, state: &mut PendingReplies<B>) {
        let lost = Batch::take(state);
        state.request_count -= lost.replies.len();
        state.bytes -= lost.replies.iter().map(|(_, cost)| cost.bytes).sum::<u64>();
        self.changed.notify_all();
    }
}

impl<B: AsRef<[u8]>> Batch<B> {
    fn take(state: &mut PendingReplies<B>) -> Self {
        Self {
            replies: state.ready.drain(..).collect(),
            sent: 0,
        }
    }

    /// Sends the rest of the replies, and `own` after them.
    fn send(&mut self, own: &mut &[u8], stream: &SocketStream, wait: Wait) -> io::Result<()> {
        loop {
            let mut skip = self.sent;
            let mut pieces = Vec::with_capacity(PIECE_COUNT_MAX.min(self.replies.len() + 1));
            for (reply, _) in &self.replies {
                let bytes = reply.as_ref();
                let skipped = skip.min(bytes.len());
                skip -= skipped;
                if skipped < bytes.len() && pieces.len() < PIECE_COUNT_MAX - 1 {
                    pieces.push(IoSlice::new(&bytes[skipped..]));
                }
            }
            let rest: usize = self
                .replies
                .iter()
                .map(|(reply, _)| reply.as_ref().len())
                .sum::<usize>()
                - self.sent;
            let offered: usize = pieces.iter().map(|piece| piece.len()).sum();
            if offered == rest && !own.is_empty() {
                pieces.push(IoSlice::new(own));
            }
            if pieces.is_empty() {
                return stream.flush(wait);
            }
            let sent = stream.send(&pieces, wait)?;
            let of_replies = sent.min(rest);
            self.sent += of_replies;
            *own = &own[sent - of_replies..];
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::sync::Arc;

    use super::{Outbox, RequestCost, WorkerQuota};
    use crate::stream::{Socket, SocketStream};

    /// A thread that ends waits until all replies are gone: those that come after the end of the connection, too.
    #[test]
    fn replies_after_the_end_of_the_connection_are_discarded() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let stream = Arc::new(SocketStream::new(Socket::Unix(ours)).unwrap());
        let quota = WorkerQuota {
            request_count_max: 8,
            bytes_max: 1000,
        };
        let outbox: Arc<Outbox<Vec<u8>>> = Arc::new(Outbox::new(stream, quota));
        outbox.admit(100);
        outbox.abort(RequestCost {
            bytes: 100,
            lease: None,
        });
        outbox.push_own(b"late".to_vec(), None);
        outbox.admit(200);
        outbox.push(
            b"later".to_vec(),
            RequestCost {
                bytes: 200,
                lease: None,
            },
        );
        assert!(outbox.send(&[]).is_err());
        outbox.wait_until_empty();
        assert!(outbox.is_empty() && outbox.is_dead());
    }
}
