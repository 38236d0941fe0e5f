//! The disk of a container as a block device of the kernel's NBD client.
//!
//! The worker connects the kernel to itself. If it is killed, the kernel keeps the requests until the next worker has
//! connected it again. The kernel releases the device when the file system is unmounted, and tells the worker.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use holdfast_block::{BlockDevice as _, BlockDeviceMut, Clock};
use holdfast_host::nbd_device::{
    NbdRequest, connect_nbd, disconnect_nbd, reconnect_nbd, release_nbd_on_close, resize_nbd,
};
use holdfast_image::ChainStatus;
use holdfast_serve::fuse::MountEvents;
use holdfast_serve::nbd::{Event, EventSink, KernelServer};
use rustix::io::Errno;

use super::place::ContainerPlace;
use crate::job::error::ContainerError;
use crate::job::{Error, Job, Result};
use crate::restore::mount::{LOOK_INTERVAL, SupervisedPlace, WorkerDisk, WorkerFiles};

/// Any file system can be on sectors of this size, also one that was made on a loop device.
const SECTOR_BYTES: u32 = 512;
/// A request that a killed worker has received is sent again after this time.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);
/// Requests fail when no worker has come for this time.
const ABSENCE_TIMEOUT: Duration = Duration::from_secs(300);
/// How long the kernel may take to notice that a connection has ended.
const RECONNECT_PATIENCE: Duration = Duration::from_secs(10);

pub(super) fn nbd_error(place: &ContainerPlace, source: std::io::Error) -> Error {
    ContainerError::NbdDevice {
        container: place.folder.clone(),
        source,
    }
    .into()
}

/// The device of a container whose worker has connected the kernel.
pub(super) fn find_device(place: &ContainerPlace) -> Result<PathBuf> {
    let absent = || nbd_error(place, std::io::ErrorKind::NotFound.into());
    place.nbd_device().ok_or_else(absent)
}

/// Lets the kernel release the device with the last mount of its file system.
pub(super) fn release_on_unmount(place: &ContainerPlace, device: &Path) -> Result<()> {
    release_nbd_on_close(device, &place.source()).map_err(|source| nbd_error(place, source))
}

/// Lets the device, if there is one, adopt the size of the disk. Returns it.
pub(super) fn adopt_nbd_size(place: &ContainerPlace) -> Result<Option<PathBuf>> {
    let Some(device) = place.nbd_device() else {
        return Ok(None);
    };
    let size_bytes = ChainStatus::load(&place.folder)?.size_bytes;
    resize_nbd(&device, &place.source(), size_bytes).map_err(|source| nbd_error(place, source))?;
    Ok(Some(device))
}

/// The NBD device of a container, as its supervisor sees it.
pub(super) struct NbdPlace<'a>(pub(super) &'a ContainerPlace);

impl SupervisedPlace for NbdPlace<'_> {
    fn open(&self) -> Result<OwnedFd> {
        // A device whose supervisor and worker were killed.
        self.abandon();
        let nothing = File::open("/dev/null").map_err(|source| nbd_error(self.0, source))?;
        Ok(nothing.into())
    }

    fn close(&self, job: Job<'_>) -> Result<()> {
        match self.0.mount_points().first() {
            Some(point) => job.progress.warning(&format!(
                "{} is still mounted: it is served until it is unmounted",
                point.display()
            )),
            None => self.abandon(),
        }
        Ok(())
    }

    fn abandon(&self) {
        if let Some(device) = self.0.nbd_device() {
            // The kernel may have released it meanwhile.
            disconnect_nbd(&device).ok();
        }
    }
}

/// Serves `disk` to the kernel until it releases the device.
pub(super) fn serve_over_nbd(
    disk: impl BlockDeviceMut + 'static,
    place: &ContainerPlace,
    files: WorkerFiles,
    clock: Arc<dyn Clock>,
    job: Job<'_>,
    ready: &mut dyn FnMut(),
) -> Result<()> {
    let disk = WorkerDisk::prepare(disk, files.log, files.predecessor_count, job)?;
    let events = report_to(files.events, place.folder.display().to_string());
    let server = KernelServer::new(Arc::clone(&disk.device), clock, events);
    if files.predecessor_count == 0 {
        let connection = server.connect().map_err(Error::Serve)?;
        let request = NbdRequest {
            backend: &place.source(),
            size_bytes: disk.device.size_bytes(),
            sector_bytes: SECTOR_BYTES,
            flags: connection.flags,
            connection: &connection.socket,
            request_timeout: REQUEST_TIMEOUT,
            absence_timeout: ABSENCE_TIMEOUT,
        };
        connect_nbd(&request).map_err(|source| nbd_error(place, source))?;
    } else if !reconnect(&server, place, job)? {
        return Ok(());
    }
    ready();
    disk.report_successors()?;
    loop {
        // The kernel gets a new connection only when nothing that came through the old one is executed any more: it
        // sends the requests again, and an old write must not overtake a new one.
        while server.is_busy() {
            job.clock.sleep(LOOK_INTERVAL / 10);
        }
        if !reconnect(&server, place, job)? {
            disk.device.flush()?;
            return Ok(());
        }
    }
}

/// Connects the kernel again. Returns whether it still has the device.
fn reconnect(server: &KernelServer, place: &ContainerPlace, job: Job<'_>) -> Result<bool> {
    let connection = server.connect().map_err(Error::Serve)?;
    let deadline = job.clock.now() + RECONNECT_PATIENCE;
    loop {
        let Some(device) = place.nbd_device() else {
            return Ok(false);
        };
        let Err(source) = reconnect_nbd(&device, &place.source(), &connection.socket) else {
            return Ok(true);
        };
        match source.raw_os_error().map(Errno::from_raw_os_error) {
            // It is being released.
            Some(Errno::INVAL | Errno::NODEV) => return Ok(false),
            // The kernel has not noticed yet that the connection has ended.
            Some(Errno::NOSPC) if job.clock.now() < deadline => job.clock.sleep(LOOK_INTERVAL / 10),
            _ => return Err(nbd_error(place, source)),
        }
    }
}

fn report_to(events: Arc<dyn MountEvents>, disk: String) -> Arc<dyn EventSink> {
    Arc::new(move |event: &Event<'_>| {
        if let Event::RequestFailed { error, .. } = event {
            events.request_failed(&disk, error);
        }
    })
}
