//! Has the host write out the images of a machine before its point in time, and before its filters are removed.
//!
//! QEMU flushes disks when it moves several of them onto filters at once, when it stops a machine, and when it deletes
//! a filter. Until the flush is done it does nothing else for the machine. So dirty data in the host's page cache is
//! written out before, while the machine runs.

use std::fs::File;
use std::path::PathBuf;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use holdfast_host::qemu::{Layers, PausePolicy, QemuDisk};
use holdfast_host::qmp::query_with_retries;
use holdfast_host::{FileKind, Links, MachineState};

use super::GuestFreezer;
use crate::job::{Job, Result};

/// If a machine writes faster than its storage, writing out ends after this time.
const PATIENCE: Duration = Duration::from_secs(10);
const LOOK_INTERVAL: Duration = Duration::from_millis(50);

impl GuestFreezer<'_> {
    /// Writes out the host's cached data of these disks' images before the point in time. An image that cannot be
    /// opened is left to QEMU.
    pub(super) fn write_out(&self, wanted: &[(String, QemuDisk)], state: MachineState) -> Result<()> {
        let is_alone =
            wanted.len() == 1 && self.pause_policy == PausePolicy::WhereNeeded && self.request.memory.is_none();
        if wanted.is_empty() || is_alone || state != MachineState::Running {
            // QEMU moves a single disk onto its filter without a flush.
            return Ok(());
        }
        let layers = query_with_retries(self.request.machine.monitor(), self.job.clock, &Layers::query);
        let layers = layers.map_err(|error| self.failed(error))?;
        self.write_out_nodes(&layers, wanted.iter().map(|(_, disk)| &disk.node[..]))
    }

    /// Does the same for the disks at these nodes.
    pub(super) fn write_out_nodes<'n>(&self, layers: &Layers, nodes: impl Iterator<Item = &'n str>) -> Result<()> {
        let rights = self.request.machine.rights();
        let paths = nodes.flat_map(|node| layers.written_files(node));
        let open = |path: PathBuf| rights.open(&path, FileKind::RegularOrBlockDevice, Links::Follow).ok();
        let files: Vec<File> = paths.filter_map(open).collect();
        if files.is_empty() {
            return Ok(());
        }
        // A write error of the storage is reported to QEMU, which has the files open for writing.
        let flush = move || files.iter().for_each(|file| drop(file.sync_data()));
        wait_for(flush, self.job)
    }
}

/// Runs `work` in a thread, which ends by itself if it is no longer waited for: a flush cannot be interrupted.
fn wait_for(work: impl FnOnce() + Send + 'static, job: Job<'_>) -> Result<()> {
    let (working, is_over) = channel::<()>();
    let work = move || {
        work();
        drop(working);
    };
    if std::thread::Builder::new()
        .name("flush".to_owned())
        .spawn(work)
        .is_err()
    {
        return Ok(());
    }
    let start = job.clock.now();
    while is_over.recv_timeout(LOOK_INTERVAL) == Err(RecvTimeoutError::Timeout) {
        job.interrupt.check()?;
        if job.clock.now().saturating_sub(start) > PATIENCE {
            job.progress
                .note("the disks of the machine are written slowly: its instant may take long");
            break;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use holdfast_block::Clock;

    use super::{PATIENCE, wait_for};
    use crate::job::{Interrupt, Job, NoProgress};

    /// A clock that advances by a second each time it is read.
    #[derive(Default)]
    struct Looks(AtomicU32);

    impl Clock for Looks {
        fn now(&self) -> Duration {
            Duration::from_secs(self.0.fetch_add(1, Ordering::Relaxed).into())
        }

        fn sleep(&self, _duration: Duration) {}
    }

    #[test]
    fn a_flush_is_waited_for_but_not_for_ever_nor_after_an_interrupt() {
        let (clock, interrupt) = (Looks::default(), Interrupt::new());
        let job = Job {
            progress: &NoProgress,
            interrupt: &interrupt,
            clock: &clock,
            thread_count: 1,
        };
        let (done, is_done) = channel();
        wait_for(move || done.send(()).unwrap(), job).unwrap();
        assert!(is_done.try_recv().is_ok(), "it is waited for");
        let (over, is_over) = channel::<()>();
        wait_for(move || assert!(is_over.recv().is_err()), job).unwrap();
        assert!(clock.now() > PATIENCE);
        drop(over);
        let (_over, is_over) = channel::<()>();
        interrupt.request();
        assert!(wait_for(move || assert!(is_over.recv().is_err()), job).is_err());
    }
}
