//! A running queue: its thread takes requests, executes them or gives them to workers, and returns completed ones.
//!
//! Requests that were slow recently go to workers ([`crate::server::dispatch`]); the thread executes quick ones itself,
//! and notifies the guest once for a batch of them.

use std::fs::File;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use holdfast_block::{Clock, to_usize};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::io::Errno;
use virtio_queue::{Queue, QueueOwnedT as _, QueueT as _};
use vm_memory::GuestAddress;

use super::chain::{DescriptorTable, IndirectTables, follow};
use super::config::{QUEUE_SIZE_MAX, WriteCache};
use super::event::{VhostUserEvent, VhostUserEventSink};
use super::execute::{DiskRequest, PIECE_BYTES, WORKER_PIECE_BYTES, load_descriptor};
use super::export::VhostUserExport;
use super::inflight::{InflightQueue, ServerNumber};
use super::load::{Busy, Load};
use super::memory::{GuestMap, SharedMemory};
use super::notification::read_counter;
use crate::server::client_key::ClientKey;
use crate::server::dispatch::{Dispatch, DispatchPolicy, Work};
use crate::server::peer::Peer;
use crate::server::workers::Workers;

/// A request of this size goes to a worker if another one waits: they are executed at the same time.
const PARALLEL_BYTES: u64 = 256 << 10;
/// After a request of this size, the guest is notified before the next request of a batch.
const NOTIFY_BYTES: u64 = 64 << 10;

/// State that all queues of a connection share.
pub(super) struct RingContext {
    pub(super) export: Arc<VhostUserExport>,
    pub(super) peer: Arc<Peer>,
    pub(super) memory: SharedMemory,
    pub(super) workers: Workers,
    /// Whose share of workers requests count for.
    pub(super) key: ClientKey,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) events: Arc<dyn VhostUserEventSink>,
    pub(super) server: ServerNumber,
    pub(super) policy: DispatchPolicy,
    /// Whether the driver wants every write to be durable.
    pub(super) is_write_through: AtomicBool,
    pub(super) load: Load,
}

/// Where a ring is, in addresses of the guest.
#[derive(Debug, Clone, Copy)]
pub(super) struct RingPlace {
    pub(super) size: u16,
    pub(super) descriptors: u64,
    pub(super) available: u64,
    pub(super) used: u64,
    /// The index of the next available request.
    pub(super) base: u16,
}

/// Features of rings that the driver has accepted.
#[derive(Debug, Clone, Copy)]
pub(super) struct RingFeatures {
    pub(super) indirect: IndirectTables,
    pub(super) has_event_index: bool,
}

/// Whether requests are taken from a ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RingActivity {
    Enabled,
    Paused,
}

/// The files and memory of a ring.
pub(super) struct RingResources {
    pub(super) place: RingPlace,
    pub(super) features: RingFeatures,
    pub(super) kick: File,
    pub(super) call: Option<File>,
    pub(super) inflight: Option<InflightQueue>,
    pub(super) activity: RingActivity,
}

struct RingState {
    queue: Queue,
    inflight: Option<InflightQueue>,
}

/// A queue, shared by its thread and workers.
struct Ring {
    context: Arc<RingContext>,
    number: usize,
    features: RingFeatures,
    table: DescriptorTable,
    state: Mutex<RingState>,
    call: Mutex<Option<File>>,
    kick: File,
    /// Wakes the thread when one of the following changes.
    wake: OwnedFd,
    is_enabled: AtomicBool,
    is_stopping: AtomicBool,
}

/// A queue with a thread.
pub(super) struct RunningRing {
    ring: Arc<Ring>,
    thread: JoinHandle<()>,
}

/// The ring cannot be used any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct RingFailure(&'static str);

const OUTSIDE: RingFailure = RingFailure("the ring is not inside the memory of the guest, or its index is wrong");

impl From<virtio_queue::Error> for RingFailure {
    fn from(_: virtio_queue::Error) -> Self {
        OUTSIDE
    }
}

impl RunningRing {
    /// Starts the thread of a queue. Requests that a predecessor did not complete are executed first.
    pub(super) fn start(
        context: &Arc<RingContext>,
        number: usize,
        resources: RingResources,
    ) -> Result<Self, &'static str> {
        let RingResources { place, features, .. } = resources;
        let memory = context.memory.get();
        let mut queue = queue_of(place, features, &memory).map_err(|failure| failure.0)?;
        let mut inflight = resources.inflight;
        let mut repeated = Vec::new();
        if let Some(inflight) = &mut inflight {
            let used_index = queue.next_used();
            repeated = inflight.begin(place.size, used_index, context.server);
            // Requests before this index were completed, or are in progress.
            let repeated_count = u16::try_from(repeated.len()).unwrap_or(0);
            queue.set_next_avail(used_index.wrapping_add(repeated_count));
        }
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let ring = Arc::new(Ring {
            context: Arc::clone(context),
            number,
            features,
            table: DescriptorTable {
                address: place.descriptors,
                descriptor_count: place.size,
            },
            state: Mutex::new(RingState { queue, inflight }),
            call: Mutex::new(resources.call),
            kick: resources.kick,
            wake: wake.map_err(|_| "no more files can be opened")?,
            is_enabled: AtomicBool::new(resources.activity == RingActivity::Enabled),
            is_stopping: AtomicBool::new(false),
        });
        let theirs = Arc::clone(&ring);
        let thread = std::thread::Builder::new().name("serve-vhost-ring".to_owned());
        let thread = thread.spawn(move || theirs.run(&repeated));
        let thread = thread.map_err(|_| "no more threads can be started")?;
        Ok(Self { ring, thread })
    }

    pub(super) fn set_call(&self, call: Option<File>) {
        *self.ring.call.lock().unwrap_or_else(PoisonError::into_inner) = call;
        // A request may have been completed before the front end could be notified.
        self.ring.notify();
    }

    /// Continues to take requests, or pauses.
    pub(super) fn set_activity(&self, activity: RingActivity) {
        self.ring
            .is_enabled
            .store(activity == RingActivity::Enabled, Ordering::Release);
        self.ring.wake();
    }

    /// Stops the queue after its requests in progress. Returns the index of the next available request, and the file of
    /// notifications.
    pub(super) fn stop(self) -> StoppedRing {
        self.ring.is_stopping.store(true, Ordering::Release);
        self.ring.wake();
        // A panic of that thread was already reported.
        drop(self.thread.join());
        self.ring.context.load.drain(self.ring.number);
        let call = self.ring.call.lock().unwrap_or_else(PoisonError::into_inner).take();
        StoppedRing {
            base: self.ring.lock().queue.next_avail(),
            call,
        }
    }
}

/// The rest of a queue that was stopped.
pub(super) struct StoppedRing {
    /// The index of the next available request.
    pub(super) base: u16,
    /// Where the front end is notified.
    pub(super) call: Option<File>,
}

fn queue_of(place: RingPlace, features: RingFeatures, memory: &GuestMap) -> Result<Queue, RingFailure> {
    let mut queue = Queue::new(QUEUE_SIZE_MAX)?;
    queue.try_set_size(place.size)?;
    queue.try_set_desc_table_address(GuestAddress(place.descriptors))?;
    queue.try_set_avail_ring_address(GuestAddress(place.available))?;
    queue.try_set_used_ring_address(GuestAddress(place.used))?;
    queue.set_event_idx(features.has_event_index);
    queue.set_next_avail(place.base);
    queue.set_ready(true);
    if !queue.is_valid(memory.memory()) {
        return Err(OUTSIDE);
    }
    let used_index = queue.used_idx(memory.memory(), Ordering::Acquire)?;
    queue.set_next_used(used_index.0);
    Ok(queue)
}

/// Whether other requests were available when one was taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RingWait {
    None,
    Some,
}

/// Whether the guest learns of a completed request at once, or with later ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Notification {
    Now,
    Later,
}

impl Ring {
    fn lock(&self) -> MutexGuard<'_, RingState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wake(&self) {
        // A counter that is full wakes the thread as well.
        rustix::io::write(&self.wake, &1u64.to_ne_bytes()).unwrap_or_default();
    }

    fn is_stopping(&self) -> bool {
        self.is_stopping.load(Ordering::Acquire)
    }

    /// The body of the thread.
    fn run(self: &Arc<Self>, repeated: &[u16]) {
        let mut piece = vec![0; to_usize(PIECE_BYTES)];
        if let Err(RingFailure(reason)) = self.serve(repeated, &mut piece) {
            self.context.events.vhost_user_event(&VhostUserEvent::QueueFailed {
                export: &self.context.export.name,
                peer: &self.context.peer,
                queue: self.number,
                reason,
            });
        }
    }

    fn serve(self: &Arc<Self>, repeated: &[u16], piece: &mut [u8]) -> Result<(), RingFailure> {
        let mut repeated = repeated.iter();
        while !self.is_stopping() {
            if self.is_enabled.load(Ordering::Acquire) {
                let _busy = Busy::new(&self.context.load);
                for head in repeated.by_ref() {
                    self.handle(*head, RingWait::None, piece)?;
                }
                self.take_all(piece)?;
            }
            self.wait()?;
        }
        Ok(())
    }

    /// Waits for a notification of the front end or of the server.
    fn wait(&self) -> Result<(), RingFailure> {
        let gone = RingFailure("the file of notifications is not valid");
        let mut files = [
            PollFd::new(&self.wake, PollFlags::IN),
            PollFd::new(&self.kick, PollFlags::IN),
        ];
        loop {
            match poll(&mut files, None) {
                Ok(_) => {}
                Err(Errno::INTR) => continue,
                Err(_) => return Err(gone),
            }
            let [wake, kick] = &files;
            if wake.revents().contains(PollFlags::IN) {
                read_counter(self.wake.as_fd()).map_err(|_| gone)?;
                return Ok(());
            }
            if kick.revents().contains(PollFlags::IN) {
                read_counter(self.kick.as_fd()).map_err(|_| gone)?;
                return Ok(());
            }
            if !kick.revents().is_empty() {
                return Err(gone);
            }
        }
    }

    /// Handles all available requests.
    fn take_all(self: &Arc<Self>, piece: &mut [u8]) -> Result<(), RingFailure> {
        let mut empty_count = 0;
        loop {
            let memory = self.context.memory.get();
            self.lock().queue.disable_notification(memory.memory())?;
            let mut count = 0;
            while !self.is_stopping() && self.is_enabled.load(Ordering::Acquire) {
                let Some((head, waiting)) = self.take(&memory)? else {
                    break;
                };
                count += 1;
                self.handle(head, waiting, piece)?;
            }
            self.notify();
            empty_count = if count == 0 { empty_count + 1 } else { 0 };
            // Requests that were added meanwhile come without another notification.
            let has_more = self.lock().queue.enable_notification(memory.memory())?;
            if !has_more || self.is_stopping() || !self.is_enabled.load(Ordering::Acquire) {
                return Ok(());
            }
            if empty_count > 1 {
                return Err(OUTSIDE);
            }
        }
    }

    /// Takes the next available request: the index of its first descriptor.
    fn take(&self, memory: &GuestMap) -> Result<Option<(u16, RingWait)>, RingFailure> {
        let mut state = self.lock();
        let taken = state
            .queue
            .iter(memory.memory())?
            .next()
            .map(|chain| chain.head_index());
        let Some(head) = taken else {
            return Ok(None);
        };
        if head >= self.table.descriptor_count {
            return Err(OUTSIDE);
        }
        if let Some(inflight) = &mut state.inflight {
            inflight.take(head);
        }
        let available = state.queue.avail_idx(memory.memory(), Ordering::Acquire)?;
        let waiting = if available.0 == state.queue.next_avail() {
            RingWait::None
        } else {
            RingWait::Some
        };
        Ok(Some((head, waiting)))
    }

    /// Executes a request, or gives it to a worker.
    fn handle(self: &Arc<Self>, head: u16, waiting: RingWait, piece: &mut [u8]) -> Result<(), RingFailure> {
        let memory = self.context.memory.get();
        let chain = follow(self.table, head, self.features.indirect, &load_descriptor(&memory));
        let request = match chain {
            Err(error) => Err(error.reason()),
            Ok(chain) => DiskRequest::parse(head, chain, memory, &self.context.export)
                .map_err(|_| "a request has no place for its status"),
        };
        let request = match request {
            Ok(request) => request,
            Err(reason) => {
                self.context.events.vhost_user_event(&VhostUserEvent::InvalidRequest {
                    export: &self.context.export.name,
                    peer: &self.context.peer,
                    reason,
                });
                // Returned without data, so that the driver can use its descriptors again.
                return self.complete(head, 0, Notification::Later);
            }
        };
        let work = request.work();
        let dispatch = work.map_or(Dispatch::Inline, |work| self.context.policy.choose(work.class));
        let is_parallel = waiting == RingWait::Some && work.is_some_and(|work| work.bytes >= PARALLEL_BYTES);
        match dispatch {
            Dispatch::Inline if is_parallel => {
                self.delegate(request, work, PIECE_BYTES);
                Ok(())
            }
            Dispatch::Inline => {
                let written_bytes = self.execute(&request, work, piece);
                let is_large = work.is_some_and(|work| work.bytes >= NOTIFY_BYTES);
                let notification = if is_large {
                    Notification::Now
                } else {
                    Notification::Later
                };
                self.complete(head, written_bytes, notification)
            }
            Dispatch::Worker => {
                self.delegate(request, work, WORKER_PIECE_BYTES);
                Ok(())
            }
        }
    }

    /// Gives a request to a worker, which copies up to `piece_bytes` at a time.
    fn delegate(self: &Arc<Self>, request: DiskRequest, work: Option<Work>, piece_bytes: u64) {
        self.context.load.delegate(self.number);
        let delegated = Delegated(Arc::clone(self));
        let run = move || {
            let ring = &delegated.0;
            let bytes = work.map_or(0, |work| work.bytes);
            let mut piece = vec![0; to_usize(bytes.clamp(1, piece_bytes))];
            let written_bytes = ring.execute(&request, work, &mut piece);
            // If the ring is not valid any more, its thread reports that.
            ring.complete(request.head, written_bytes, Notification::Now).ok();
        };
        self.context.workers.submit(self.context.key, Box::new(run));
    }

    /// Executes a request, measures its time, and reports an error of the device.
    fn execute(&self, request: &DiskRequest, work: Option<Work>, piece: &mut [u8]) -> u32 {
        let context = &self.context;
        let cache = if context.is_write_through.load(Ordering::Acquire) {
            WriteCache::WriteThrough
        } else {
            WriteCache::WriteBack
        };
        let begun = context.clock.now();
        let executed = request.execute(&context.export, cache, piece);
        if let Some(work) = work {
            context.policy.record(work, context.clock.now().saturating_sub(begun));
        }
        if let Some(error) = &executed.error {
            context.events.vhost_user_event(&VhostUserEvent::RequestFailed {
                export: &context.export.name,
                peer: &context.peer,
                action: request.name(),
                error,
            });
        }
        executed.written_bytes
    }

    /// Returns a request to the driver.
    fn complete(&self, head: u16, written_bytes: u32, notification: Notification) -> Result<(), RingFailure> {
        {
            let memory = self.context.memory.get();
            let mut state = self.lock();
            if let Some(inflight) = &state.inflight {
                inflight.complete(head);
            }
            state.queue.add_used(memory.memory(), head, written_bytes)?;
            let used_index = state.queue.next_used();
            if let Some(inflight) = &state.inflight {
                inflight.published(head, used_index);
            }
        }
        if notification == Notification::Now {
            self.notify();
        }
        Ok(())
    }

    /// Notifies the guest if it waits for completed requests.
    fn notify(&self) {
        let memory = self.context.memory.get();
        // If the ring is not valid any more, its thread reports that.
        if self.lock().queue.needs_notification(memory.memory()).unwrap_or(false) {
            let call = self.call.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(call) = &*call {
                // A counter that is full notifies as well.
                rustix::io::write(call, &1u64.to_ne_bytes()).unwrap_or_default();
            }
        }
    }
}

/// Counts a request of a worker until it ends, also by a panic.
struct Delegated(Arc<Ring>);

impl Drop for Delegated {
    fn drop(&mut self) {
        self.0.context.load.done(self.0.number);
    }
}
