//! Copies ranges of a frozen disk into a file, by QEMU's backup jobs.
//!
//! This is how Holdfast reads a disk that QEMU's NBD server must not export
//! ([`Danger::NbdClientOfIothread`](super::Danger)). QEMU exports a node without data instead. The reader requests
//! ranges by writing zeroes to that node, whose bitmap records them. A job then copies the recorded ranges from the
//! frozen disk into the file. The job waits for local files only, so no failure of the reader can block the guest,
//! not even when QEMU has to wait for the job (a reset, a pause).

use std::time::Duration;

use holdfast_block::Clock;
use serde_json::{Value, json};

use super::jobs::{QemuJob, dismiss_job, jobs};
use super::names::{Role, RunId};
use crate::qemu::qmp::{Monitor, MonitorError, QmpCommand, Result};

const POLL_INTERVAL: Duration = Duration::from_millis(5);
/// A cancelled job ends when its last request to a file has completed.
const END_ATTEMPT_COUNT: u32 = 600;
const END_INTERVAL: Duration = Duration::from_millis(50);
/// Unit of QEMU's copies, and granularity of the bitmaps.
pub(super) const UNIT_BYTES: u64 = 64 << 10;

/// The bitmap of the marks node with the requested ranges.
const WANTED: &str = "wanted";

/// Copies ranges of one frozen disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PartCopier {
    job: String,
    bitmap: String,
    frozen: String,
    spool: String,
    marks: String,
    copying: String,
}

impl PartCopier {
    pub(super) fn new(run: RunId, number: usize) -> Self {
        Self {
            job: run.thing(&format!("copy{number}")),
            bitmap: run.thing(WANTED),
            frozen: run.node(number, Role::Frozen),
            spool: run.node(number, Role::Spool),
            marks: run.node(number, Role::Marks),
            copying: run.node(number, Role::Copying),
        }
    }

    /// Adds the marks node, `size_bytes` long, and the bitmaps.
    pub(super) fn prepare(&self, monitor: &dyn Monitor, size_bytes: u64) -> Result<()> {
        let marks = json!({ "driver": "null-co", "node-name": self.marks, "size": size_bytes, "read-zeroes": true });
        monitor.execute(&QmpCommand::new("blockdev-add", marks))?;
        let bitmap = |node: &str, is_disabled: bool| {
            let name = &self.bitmap;
            json!({
                "type": "block-dirty-bitmap-add",
                "data": { "node": node, "name": name, "granularity": UNIT_BYTES, "disabled": is_disabled },
            })
        };
        transact(monitor, &[bitmap(&self.marks, false), bitmap(&self.frozen, true)])
    }

    /// Copies the ranges that were requested since the last call into the file, and returns when they are complete.
    ///
    /// # Errors
    /// The job failed, or disappeared because the copy of the disk is broken or was abandoned, or `is_wanted`
    /// returned false.
    pub fn copy(&self, monitor: &dyn Monitor, clock: &dyn Clock, is_wanted: &dyn Fn() -> bool) -> Result<()> {
        let clear =
            |node: &str| json!({ "type": "block-dirty-bitmap-clear", "data": { "node": node, "name": self.bitmap } });
        let merge = json!({
            "type": "block-dirty-bitmap-merge",
            "data": {
                "node": self.frozen,
                "target": self.bitmap,
                "bitmaps": [{ "node": self.marks, "name": self.bitmap }],
            },
        });
        transact(monitor, &[clear(&self.frozen), merge, clear(&self.marks)])?;
        let job = json!({
            "job-id": self.job,
            "device": self.frozen,
            "target": self.spool,
            "filter-node-name": self.copying,
            "sync": "bitmap",
            "bitmap": self.bitmap,
            "bitmap-mode": "never",
            "auto-dismiss": false,
        });
        monitor.execute(&QmpCommand::new("blockdev-backup", job))?;
        let mut is_cancelled = false;
        loop {
            let found = jobs(monitor)?.into_iter().find(|job| job.id == self.job);
            let Some(job) = found else {
                return Err(self.failed("another client ended it"));
            };
            if job.status == "concluded" {
                dismiss_job(monitor, &self.job)?;
                return match job.error {
                    Some(error) => Err(self.failed(&error)),
                    None if is_cancelled => Err(self.failed("it was cancelled")),
                    None => Ok(()),
                };
            }
            if !is_cancelled && !is_wanted() {
                cancel(monitor, &self.job)?;
                is_cancelled = true;
            }
            clock.sleep(POLL_INTERVAL);
        }
    }

    /// Ends a running job, so that another range can be copied.
    pub fn abandon(&self, monitor: &dyn Monitor, clock: &dyn Clock) -> Result<()> {
        end_jobs(monitor, clock, &|id| id == self.job)
    }

    fn failed(&self, description: &str) -> MonitorError {
        MonitorError::Refused {
            command: format!("the job {}", self.job),
            class: "GenericError".to_owned(),
            description: description.to_owned(),
        }
    }
}

/// Ends and dismisses the jobs with these names.
pub(super) fn end_jobs(monitor: &dyn Monitor, clock: &dyn Clock, is_one: &dyn Fn(&str) -> bool) -> Result<()> {
    for _ in 0..END_ATTEMPT_COUNT {
        let present: Vec<QemuJob> = jobs(monitor)?.into_iter().filter(|job| is_one(&job.id)).collect();
        if present.is_empty() {
            return Ok(());
        }
        for job in &present {
            let done = match &job.status[..] {
                "concluded" => dismiss_job(monitor, &job.id),
                _ => cancel(monitor, &job.id),
            };
            match done {
                // The reader has dismissed the job.
                Err(error) if !error.is_refusal() => return Err(error),
                _ => {}
            }
        }
        if present.iter().any(|job| job.status != "concluded") {
            clock.sleep(END_INTERVAL);
        }
    }
    Err(MonitorError::Busy {
        with: "a copy job that does not end".to_owned(),
    })
}

fn cancel(monitor: &dyn Monitor, id: &str) -> Result<()> {
    match monitor.execute(&QmpCommand::new("job-cancel", json!({ "id": id }))) {
        // The job has ended by itself.
        Err(error) if !error.is_refusal() => Err(error),
        _ => Ok(()),
    }
}

fn transact(monitor: &dyn Monitor, actions: &[Value]) -> Result<()> {
    let transaction = QmpCommand::new("transaction", json!({ "actions": actions }));
    monitor.execute(&transaction).map(drop)
}
