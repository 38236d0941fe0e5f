//! Executes a command on any thread, measures its time, and reports errors of the device.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use holdfast_block::{Clock, Error as DeviceError};

use super::super::frames::Frames;
use super::super::session::{ReadyTask, SessionInfo, TaskKind};
use super::event::{TargetEvent, TargetEventSink};
use crate::server::dispatch::{DispatchPolicy, Work, WorkClass};
use crate::server::peer::Peer;

/// The class of a command; `None` if it needs no measurement, because it does not use the device.
pub(super) fn work_of(task: &ReadyTask) -> Option<Work> {
    let class = match task.kind() {
        TaskKind::Inquiry => return None,
        TaskKind::Read => WorkClass::Read,
        TaskKind::Write => WorkClass::Write,
        TaskKind::Durable => WorkClass::Durable,
        TaskKind::Other => WorkClass::Other,
    };
    Some(Work {
        class,
        bytes: task.byte_count(),
    })
}

/// The data that is needed to execute a command, on any thread.
pub(super) struct Execution {
    pub(super) clock: Arc<dyn Clock>,
    pub(super) events: Arc<dyn TargetEventSink>,
    pub(super) peer: Arc<Peer>,
    pub(super) info: Arc<SessionInfo>,
    pub(super) dispatch: Arc<DispatchPolicy>,
    pub(super) work: Option<Work>,
}

impl Execution {
    /// Executes a command, measures its time, and reports an error of the device.
    pub(super) fn run(&self, task: &ReadyTask) -> Frames {
        let clock = &*self.clock;
        let begun = clock.now();
        // A panic of a device fails the command, not the server.
        let done = catch_unwind(AssertUnwindSafe(|| task.run(&self.info)));
        if let Some(work) = self.work {
            self.dispatch.record(work, clock.now().saturating_sub(begun));
        }
        let (frames, error) = match done {
            Ok((frames, None)) => return frames,
            Ok((frames, Some(error))) => (frames, error),
            Err(_) => {
                let error = std::io::Error::other("the device of the logical unit panicked");
                (task.panicked(), DeviceError::layer(error))
            }
        };
        self.events.target_event(&TargetEvent::CommandFailed {
            peer: &self.peer,
            target: self.info.target.as_ref().map_or("", |target| target.name()),
            action: task.action(),
            error: &error,
        });
        frames
    }
}
