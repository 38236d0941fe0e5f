//! Executes a request on any thread, measures its time, and reports errors of the device.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use holdfast_block::{Clock, Error as DeviceError};

use super::event::{Event, EventSink};
use super::execute::{Drain, Executor};
use super::reply::{ReplyBuffer, ReplyTarget};
use super::request::{Request, RequestCommand};
use super::work::work_of;
use crate::nbd::wire::ErrorNumber;
use crate::server::dispatch::DispatchPolicy;
use crate::server::peer::Peer;

/// The data that is needed to execute a request, on any thread.
pub(super) struct RequestContext {
    pub(super) clock: Arc<dyn Clock>,
    pub(super) events: Arc<dyn EventSink>,
    pub(super) peer: Arc<Peer>,
    pub(super) executor: Executor,
    pub(super) dispatch: DispatchPolicy,
}

impl RequestContext {
    /// Executes `request`, appends its reply, measures the time, and reports errors of the device.
    pub(super) fn execute(&self, request: &Request, payload: &[u8], replies: &mut ReplyBuffer, drain: Drain<'_>) {
        let clock = &*self.clock;
        let begun = clock.now();
        let mut waited = Duration::ZERO;
        let mut timed_drain = drain.map(|drain| {
            |replies: &mut ReplyBuffer| {
                let begun = clock.now();
                drain(replies);
                waited += clock.now().saturating_sub(begun);
            }
        });
        let drain = timed_drain
            .as_mut()
            .map(|drain| drain as &mut dyn FnMut(&mut ReplyBuffer));
        // A panic of a device fails the request, not the server.
        let done = catch_unwind(AssertUnwindSafe(|| {
            self.executor.execute(request, payload, replies, drain)
        }));
        // The time spent waiting for the peer does not count.
        self.dispatch
            .record(work_of(request), clock.now().saturating_sub(begun + waited));
        let error = match done {
            Ok(Ok(())) => return,
            Ok(Err(error)) => error,
            Err(_) => {
                let message = "the device of the export panicked";
                replies.abandon();
                replies.error(
                    self.executor.session.terms.style,
                    reply_target(request),
                    ErrorNumber::EIO,
                    message,
                );
                DeviceError::layer(std::io::Error::other(message))
            }
        };
        self.events.event(&Event::RequestFailed {
            peer: &self.peer,
            export: self.executor.session.export.name(),
            action: action(request),
            offset: request.offset,
            length: request.length,
            error: &error,
        });
    }
}

fn reply_target(request: &Request) -> ReplyTarget {
    ReplyTarget {
        cookie: request.cookie,
        offset: request.offset,
    }
}

fn action(request: &Request) -> &'static str {
    match request.command {
        RequestCommand::Read(_) => "read",
        RequestCommand::Write => "write",
        RequestCommand::Flush => "flush",
        RequestCommand::Trim => "trim",
        RequestCommand::Cache => "read ahead",
        RequestCommand::WriteZeroes(_) => "write zeroes",
        RequestCommand::BlockStatus { .. } => "look for extents",
    }
}
