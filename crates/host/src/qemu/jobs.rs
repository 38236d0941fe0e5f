//! Block jobs of a running QEMU: copies, commits and backups.

use serde_json::{Value, json};

use crate::qemu::qmp::{Monitor, MonitorError, QmpCommand, Result};

/// A job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QemuJob {
    /// The id: "commit-vda-libvirt-2-format".
    pub id: String,
    /// The type: "commit", "mirror", "backup".
    pub kind: String,
    /// The status in QEMU's terms.
    pub status: String,
    /// The error message of a failed job.
    pub error: Option<String>,
    /// Whether the job is stopped because of a failed read or write.
    pub has_failed_io: bool,
}

/// The jobs of a QEMU.
pub fn jobs(monitor: &dyn Monitor) -> Result<Vec<QemuJob>> {
    let of_blocks = list(monitor, "query-block-jobs", Value::Null)?;
    let all = list(monitor, "query-jobs", Value::Null)?;
    let text = |value: &Value, key: &str| Some(value.get(key)?.as_str()?.to_owned());
    let job = |value: &Value| {
        let id = text(value, "id")?;
        let of_blocks = of_blocks.iter().find(|job| text(job, "device").as_ref() == Some(&id));
        let io_status = of_blocks.and_then(|job| text(job, "io-status"));
        Some(QemuJob {
            kind: text(value, "type")?,
            status: text(value, "status")?,
            error: text(value, "error"),
            has_failed_io: io_status.is_some_and(|status| status != "ok"),
            id,
        })
    };
    Ok(all.iter().filter_map(job).collect())
}

/// Removes a job that has ended.
pub fn dismiss_job(monitor: &dyn Monitor, id: &str) -> Result<()> {
    let command = QmpCommand::new("job-dismiss", json!({ "id": id }));
    monitor.execute(&command).map(drop)
}

/// Removes a bitmap from a node, and from its image.
pub fn remove_bitmap(monitor: &dyn Monitor, node: &str, name: &str) -> Result<()> {
    let command = QmpCommand::new("block-dirty-bitmap-remove", json!({ "node": node, "name": name }));
    monitor.execute(&command).map(drop)
}

/// Resumes the processors.
pub fn resume(monitor: &dyn Monitor) -> Result<()> {
    monitor.execute(&QmpCommand::new("cont", Value::Null)).map(drop)
}

/// Fails if a copy or commit is in progress: it writes to disks without the guest, and replaces their nodes.
pub(crate) fn refuse_jobs(monitor: &dyn Monitor) -> Result<()> {
    let under_way = jobs(monitor)?.into_iter().find(|job| job.status != "concluded");
    under_way.map_or(Ok(()), |job| {
        Err(MonitorError::Busy {
            with: format!("its {} job {}", job.kind, job.id),
        })
    })
}

/// Executes all actions, or none.
pub(crate) fn transact(monitor: &dyn Monitor, actions: &[Value]) -> Result<()> {
    if actions.is_empty() {
        return Ok(());
    }
    let command = QmpCommand::new("transaction", json!({ "actions": actions }));
    monitor.execute(&command).map(drop)
}

pub(crate) fn list(monitor: &dyn Monitor, command: &'static str, arguments: Value) -> Result<Vec<Value>> {
    match monitor.execute(&QmpCommand::new(command, arguments))? {
        Value::Array(items) => Ok(items),
        _ => Err(MonitorError::Invalid {
            command: command.to_owned(),
            detail: "not a list".to_owned(),
        }),
    }
}
