//! The server of a machine whose disks are being filled: a separate, detached process.

use std::fs::DirBuilder;
use std::io::Write as _;
use std::os::unix::fs::{DirBuilderExt as _, chown};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use holdfast_block::Clock;
use holdfast_repo::Repository;
use holdfast_serve::nbd::{EventSink, TlsPolicy};
use jiff::tz::TimeZone;
use rustix::process::{Pid, Signal, kill_process};

use super::pause;
use crate::SnapshotName;
use crate::job::error::InstantError;
use crate::job::{DiskName, Error, Job, Result};
use crate::restore::instant_job::InstantJob;
use crate::restore::serve::doors::ServeAddress;
use crate::restore::serve::{ClientWrites, NbdOptions, ServeRequest, ServeSource, SourceChoice, overlay_path, serve};

/// The lock file of the server, which contains its process id.
const LOCK: &str = "server";
/// How long a server may take to end before it is killed.
const END_DEADLINE: Duration = Duration::from_secs(15);

/// Serves the disks of the job in a folder until the job is interrupted. `ready` is called when clients can connect.
pub fn serve_instantly(
    repository: &Repository,
    folder: &Path,
    events: Arc<dyn EventSink>,
    clock: Arc<dyn Clock>,
    job: Job<'_>,
    ready: &mut dyn FnMut(),
) -> Result<()> {
    let instant = InstantJob::read(folder)?;
    let lock = instant.lock(LOCK)?;
    // Two servers that write to one overlay would destroy it.
    let mut lock = lock.ok_or_else(|| failed(&instant, "there is one already"))?;
    let number = std::process::id().to_string();
    lock.set_len(0)
        .and_then(|()| lock.write_all(number.as_bytes()))
        .map_err(|error| failed(&instant, &error.to_string()))?;
    let overlays = instant.overlays();
    let made = DirBuilder::new().mode(0o700).recursive(true).create(&overlays);
    made.map_err(|source| Error::File {
        action: "make the folder",
        path: overlays.clone(),
        source,
    })?;
    if instant.has_begun() {
        refuse_lost_writes(&instant)?;
    }
    let name = |disk: &super::InstantDisk| format!("{}:{}", instant.snapshot, disk.name).parse::<SnapshotName>();
    let names = instant.disks.iter().map(name);
    let request = ServeRequest {
        choice: SourceChoice {
            sources: names
                .map(|name| name.map(ServeSource::Snapshot))
                .collect::<std::result::Result<_, _>>()?,
            writes: ClientWrites::Keep(overlays),
            machine: None,
        },
        zone: TimeZone::UTC,
        nbd: Some(NbdOptions {
            doors: vec![ServeAddress::Unix(instant.socket())],
            tls: TlsPolicy::Off,
            events,
        }),
        iscsi: None,
        vhost_user: None,
        connection_count_max: None,
        // Its exports belong to the job.
        control: None,
        clock,
    };
    serve(Some(repository), request, job, &mut |_| {
        if let Some((user, group)) = instant.user_of_machines
            && let Err(error) = chown(instant.socket(), Some(user), Some(group))
        {
            // If this process already runs as the user of the machines, no ownership has to change.
            job.progress.warning(&format!(
                "{} stays ours, which is right only where machines run as this user: {error}",
                instant.socket().display()
            ));
        }
        ready();
    })
}

/// Refuses to start a machine from the snapshot alone if it has run and its writes are missing.
fn refuse_lost_writes(instant: &InstantJob) -> Result<()> {
    for disk in &instant.disks {
        let overlay = overlay_path(&instant.overlays(), &instant.snapshot, &DiskName::new(&*disk.name)?);
        if !overlay.exists() {
            let overlay = overlay.display();
            return Err(failed(
                instant,
                &format!(
                    "what its guest has written to {} is not there: {overlay}; is its image complete?",
                    disk.name
                ),
            ));
        }
    }
    Ok(())
}

fn failed(instant: &InstantJob, reason: &str) -> Error {
    InstantError::Server {
        machine: instant.machine.clone(),
        reason: reason.to_owned(),
    }
    .into()
}

/// Whether the server of a job is running.
pub(super) fn lives(instant: &InstantJob) -> Result<bool> {
    instant.is_locked(LOCK)
}

/// Stops the server of a job, if there is one.
pub(super) fn stop(instant: &InstantJob, clock: &dyn Clock) {
    let start = clock.now();
    while lives(instant).unwrap_or(false) {
        // If the server runs on another host or in a container, its process id means another process here.
        let number = std::fs::read_to_string(instant.folder.join(LOCK)).unwrap_or_default();
        let waited = clock.now().saturating_sub(start);
        if waited > 2 * END_DEADLINE {
            return;
        }
        let is_late = waited > END_DEADLINE;
        match number
            .parse::<u32>()
            .map(|number| (Pid::from_raw(number.cast_signed()), serves(number, instant)))
        {
            Ok((Some(process), true)) => {
                kill_process(process, if is_late { Signal::KILL } else { Signal::TERM }).ok();
            }
            Ok(_) => return,
            // The server has just started and has not written its process id yet.
            Err(_) => {}
        }
        pause(clock);
    }
}

/// Whether a process is the server of a job, by its arguments.
fn serves(process: u32, instant: &InstantJob) -> bool {
    let folder = instant.folder.canonicalize().ok();
    let words = holdfast_host::command_line_of(process);
    folder.is_some() && words.iter().any(|word| Path::new(word).canonicalize().ok() == folder)
}
