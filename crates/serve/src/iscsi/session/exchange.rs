//! The tasks that are being executed, and the order of responses.
//!
//! Workers and the receiving thread share this state. Responses get their sequence numbers under its lock, in the order
//! in which they are queued. A task that was aborted gets no response; the response to the request that aborted it
//! waits until the last affected task has ended.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::super::frames::{Frames, SequenceNumbers};

/// Whether a task was sent for immediate delivery.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TaskDelivery {
    /// It counts for the command window.
    InOrder,
    Immediate,
}

/// The fate of an executing task.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    Answer,
    /// It was aborted: it gets no response.
    Silence,
}

#[derive(Debug, Clone, Copy)]
struct Executing {
    /// The LUN field of the command.
    lun: [u8; 8],
    delivery: TaskDelivery,
    fate: Fate,
}

/// The response to a task management request, and the tasks that it waits for.
#[derive(Debug)]
struct WaitingResponse {
    tasks: BTreeSet<u32>,
    frames: Frames,
}

/// A queued response.
#[derive(Debug)]
pub(crate) enum Queued {
    /// The response of a task; empty if the task was aborted.
    OfTask(Frames),
    /// Another response.
    Own(Frames),
}

/// The shared state of a connection in the full feature phase.
#[derive(Debug)]
pub(crate) struct Exchange {
    state: Mutex<ExchangeState>,
}

#[derive(Debug)]
struct ExchangeState {
    numbers: SequenceNumbers,
    executing: BTreeMap<u32, Executing>,
    waiting: Vec<WaitingResponse>,
}

impl Exchange {
    pub(crate) fn new(numbers: SequenceNumbers) -> Self {
        Self {
            state: Mutex::new(ExchangeState {
                numbers,
                executing: BTreeMap::new(),
                waiting: Vec::new(),
            }),
        }
    }

    fn lock(&self) -> MutexGuard<'_, ExchangeState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn numbers(&self) -> SequenceNumbers {
        self.lock().numbers
    }

    /// Changes the sequence numbers.
    pub(crate) fn update(&self, change: impl FnOnce(&mut SequenceNumbers)) {
        change(&mut self.lock().numbers);
    }

    /// Whether a task with this tag is being executed.
    pub(crate) fn is_executing(&self, task_tag: u32) -> bool {
        self.lock().executing.contains_key(&task_tag)
    }

    /// Number of tasks that are being executed.
    pub(crate) fn executing_count(&self) -> usize {
        self.lock().executing.len()
    }

    /// Number of responses that wait for the end of tasks.
    pub(crate) fn waiting_count(&self) -> usize {
        self.lock().waiting.len()
    }

    /// The tags of the executing tasks of a logical unit.
    pub(crate) fn tags_of(&self, lun: [u8; 8]) -> BTreeSet<u32> {
        let state = self.lock();
        let of_unit = state.executing.iter().filter(|(_, task)| task.lun == lun);
        of_unit.map(|(tag, _)| *tag).collect()
    }

    /// The execution of a task begins.
    pub(crate) fn begin(&self, task_tag: u32, lun: [u8; 8], delivery: TaskDelivery) {
        let executing = Executing {
            lun,
            delivery,
            fate: Fate::Answer,
        };
        self.lock().executing.insert(task_tag, executing);
    }

    /// Queues a response that no task has.
    pub(crate) fn respond(&self, mut frames: Frames, queue: &mut dyn FnMut(Queued)) {
        let mut state = self.lock();
        frames.stamp(&mut state.numbers);
        queue(Queued::Own(frames));
    }

    /// The execution of a task has ended: queues its response, and the responses that waited for it.
    pub(crate) fn complete(&self, task_tag: u32, mut frames: Frames, queue: &mut dyn FnMut(Queued)) {
        let mut state = self.lock();
        let task = state.executing.remove(&task_tag);
        if task.is_some_and(|task| task.delivery == TaskDelivery::InOrder) {
            state.numbers.command_count = state.numbers.command_count.saturating_sub(1);
        }
        if task.is_some_and(|task| task.fate == Fate::Answer) {
            frames.stamp(&mut state.numbers);
        } else {
            frames = Frames::default();
        }
        queue(Queued::OfTask(frames));
        let ExchangeState { numbers, waiting, .. } = &mut *state;
        for response in waiting.iter_mut() {
            response.tasks.remove(&task_tag);
        }
        for mut response in waiting.extract_if(.., |response| response.tasks.is_empty()) {
            response.frames.stamp(numbers);
            queue(Queued::Own(response.frames));
        }
    }

    /// Aborts executing tasks, and queues `frames` when they have ended. Returns the number of tasks.
    pub(crate) fn abort(
        &self,
        is_affected: &dyn Fn(u32) -> bool,
        mut frames: Frames,
        queue: &mut dyn FnMut(Queued),
    ) -> usize {
        let mut state = self.lock();
        let affected = state.executing.iter_mut().filter(|(tag, _)| is_affected(**tag));
        let tasks: BTreeSet<u32> = affected
            .map(|(tag, task)| {
                task.fate = Fate::Silence;
                *tag
            })
            .collect();
        let count = tasks.len();
        if tasks.is_empty() {
            frames.stamp(&mut state.numbers);
            queue(Queued::Own(frames));
        } else {
            state.waiting.push(WaitingResponse { tasks, frames });
        }
        count
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::frames::{Frames, SequenceNumbers, StatusNumber};
    use super::super::super::pdu::{Digests, Header};
    use super::{Exchange, Queued, TaskDelivery};

    fn frames(tag: u32) -> Frames {
        let mut frames = Frames::new(Digests::default());
        frames.push(Header::response(0x21, 0x80, tag), StatusNumber::Advance, &[]);
        frames
    }

    #[test]
    fn the_response_to_an_abort_comes_when_the_last_task_has_ended() {
        let exchange = Exchange::new(SequenceNumbers {
            status: 1,
            expected_command: 3,
            command_count: 2,
            window: 8,
        });
        // Task tag, status number, and highest command number of each response; 0 for no response.
        let mut sent: Vec<(u32, u32, u32)> = Vec::new();
        let mut queue = |queued: Queued| {
            let (Queued::OfTask(frames) | Queued::Own(frames)) = queued;
            let number = |at: usize| {
                frames
                    .as_ref()
                    .get(at..at + 4)
                    .map_or(0, |it| u32::from_be_bytes(it.try_into().unwrap()))
            };
            sent.push((number(16), number(24), number(32)));
        };
        exchange.begin(1, [0; 8], TaskDelivery::InOrder);
        exchange.begin(2, [0; 8], TaskDelivery::InOrder);
        exchange.begin(3, [0; 8], TaskDelivery::Immediate);
        assert_eq!(exchange.abort(&|tag| tag != 3, frames(9), &mut queue), 2);
        exchange.complete(1, frames(1), &mut queue);
        exchange.complete(3, frames(3), &mut queue);
        exchange.complete(2, frames(2), &mut queue);
        assert_eq!(exchange.abort(&|_| true, frames(10), &mut queue), 0);
        assert_eq!(sent, [(0, 0, 0), (3, 1, 9), (0, 0, 0), (9, 2, 10), (10, 3, 10)]);
    }
}
