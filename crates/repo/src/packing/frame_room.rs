//! Limits the bytes of frames in the packing pipeline.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Memory budget for frames that were submitted and are not in their pack yet.
///
/// It is counted in bytes, since a compressed frame that waits for its predecessors takes less than an uncompressed
/// one.
pub(super) struct FrameRoom {
    state: Mutex<RoomState>,
    changed: Condvar,
    bytes_max: usize,
}

#[derive(Default)]
struct RoomState {
    taken_bytes: usize,
    is_closed: bool,
}

impl FrameRoom {
    pub(super) fn new(bytes_max: usize) -> Self {
        Self {
            state: Mutex::default(),
            changed: Condvar::new(),
            bytes_max,
        }
    }

    fn state(&self) -> MutexGuard<'_, RoomState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until this many bytes are available, and takes them; returns false if the budget was closed. With an
    /// empty budget, a frame of any size is accepted.
    pub(super) fn take(&self, bytes: usize) -> bool {
        let full = |state: &mut RoomState| {
            !state.is_closed && state.taken_bytes > 0 && state.taken_bytes + bytes > self.bytes_max
        };
        let waited = self.changed.wait_while(self.state(), full);
        let mut state = waited.unwrap_or_else(PoisonError::into_inner);
        state.taken_bytes += bytes;
        !state.is_closed
    }

    pub(super) fn give_back(&self, bytes: usize) {
        let mut state = self.state();
        state.taken_bytes = state.taken_bytes.saturating_sub(bytes);
        drop(state);
        self.changed.notify_all();
    }

    /// Releases all waiting threads, because no memory will be returned.
    pub(super) fn close(&self) {
        self.state().is_closed = true;
        self.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::FrameRoom;

    #[test]
    fn room_is_taken_up_to_the_bound_and_waited_for() {
        let room = FrameRoom::new(10);
        assert!(room.take(30), "an empty room takes any frame");
        room.give_back(24);
        assert!(room.take(4));
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| room.take(3));
            room.give_back(3);
            assert!(waiting.join().unwrap());
            let waiting = scope.spawn(|| room.take(1));
            room.close();
            assert!(!waiting.join().unwrap());
        });
        assert!(!room.take(1));
    }
}
