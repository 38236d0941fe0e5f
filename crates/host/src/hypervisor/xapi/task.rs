//! Tasks: long operations of a pool, their progress and result.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};

use super::record::Reference;
use super::{Pool, XapiError, XapiResult};

/// Poll interval of a task.
const POLL_INTERVAL: Duration = Duration::from_millis(300);

/// The state of a task.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TaskOutcome {
    /// The task succeeded, with this result.
    Success(String),
    /// The task is running, with this progress in thousandths.
    Pending(u16),
}

/// A task of the pool. Dropping it destroys the task.
pub struct Task {
    pool: Arc<Pool>,
    reference: Reference,
    request: String,
}

impl Task {
    /// Creates a task for a transfer.
    pub(super) fn new(pool: &Arc<Pool>, label: &str, request: &str) -> XapiResult<Self> {
        let reference = pool.call_for_reference("task.create", &[json!(label), json!("")])?;
        Ok(Self {
            pool: Arc::clone(pool),
            reference,
            request: request.to_owned(),
        })
    }

    /// The task of an asynchronous call.
    pub(super) fn begin(pool: &Arc<Pool>, method: &str, arguments: &[Value]) -> XapiResult<Self> {
        let reference = pool.call_for_reference(&format!("Async.{method}"), arguments)?;
        Ok(Self {
            pool: Arc::clone(pool),
            reference,
            request: method.to_owned(),
        })
    }

    pub(super) fn reference(&self) -> &Reference {
        &self.reference
    }

    /// Queries the state of the task.
    ///
    /// # Errors
    /// The task has failed, or was cancelled.
    pub fn poll(&self) -> XapiResult<TaskOutcome> {
        let record = self.pool.record("task", &self.reference)?;
        match record.text("status") {
            "success" => Ok(TaskOutcome::Success(record.text("result").to_owned())),
            "pending" | "cancelling" => {
                let thousandths = (record.fraction("progress") * 1000.0).clamp(0.0, 1000.0);
                #[expect(
                    clippy::cast_possible_truncation,
                    clippy::cast_sign_loss,
                    reason = "between 0 and 1000"
                )]
                Ok(TaskOutcome::Pending(thousandths as u16))
            }
            "failure" => {
                let mut reasons = record.texts("error_info").into_iter();
                Err(XapiError::Refused {
                    request: self.request.clone(),
                    code: reasons.next().unwrap_or_default(),
                    details: reasons.collect(),
                })
            }
            "cancelled" => Err(XapiError::Refused {
                request: self.request.clone(),
                code: "TASK_CANCELLED".to_owned(),
                details: Vec::new(),
            }),
            _ => Err(self.pool.invalid_answer("task.get_record", "its status is unknown")),
        }
    }

    /// Waits for the end of the task. `progress` receives thousandths.
    ///
    /// # Errors
    /// The task failed, or was cancelled because a stop was requested.
    pub fn wait(&self, progress: &mut dyn FnMut(u16)) -> XapiResult<String> {
        loop {
            match self.poll()? {
                TaskOutcome::Success(result) => return Ok(result),
                TaskOutcome::Pending(thousandths) => progress(thousandths),
            }
            if (self.pool.retry_context.is_stopped)() {
                self.cancel();
                return Err(XapiError::Interrupted);
            }
            self.pool.retry_context.clock.sleep(POLL_INTERVAL);
        }
    }

    pub(super) fn invalid_answer(&self, detail: &str) -> XapiError {
        self.pool.invalid_answer(&self.request, detail)
    }

    pub(super) fn cancel(&self) {
        // If the task cannot be cancelled, it ends by itself.
        drop(self.pool.call("task.cancel", &[json!(self.reference.0)]));
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        // The pool discards tasks after a day.
        drop(self.pool.call("task.destroy", &[json!(self.reference.0)]));
    }
}

/// The reference in a result: `<value>OpaqueRef:…</value>`.
pub(super) fn reference_in(result: &str) -> Option<Reference> {
    let start = result.find("OpaqueRef:")?;
    let text: String = result[start..]
        .chars()
        .take_while(|character| character.is_ascii_alphanumeric() || ":-".contains(*character))
        .collect();
    Some(Reference(text))
}

impl Pool {
    /// Runs a long operation, and returns its result.
    pub fn run(
        self: &Arc<Self>,
        method: &str,
        arguments: &[Value],
        progress: &mut dyn FnMut(u16),
    ) -> XapiResult<String> {
        Task::begin(self, method, arguments)?.wait(progress)
    }
}
