//! The images of a machine that are served to the host where it runs.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use holdfast_block::{BlockDevice as _, Clock, error_text};
use holdfast_engine::{PullNote, PullRecord};
use holdfast_host::domain_xml::PulledDisk;
use holdfast_host::stamp_of;

use super::disk_server::{DiskServer, ServedSocket};
use super::served_disk::ServedDisk;
use crate::error::{Error, Result};
use crate::image_file::ImageFile;
use crate::migration_tools::MigrationTools;

/// Interval of looking whether QEMU has given the images up.
const RELEASE_INTERVAL: Duration = Duration::from_millis(1);
/// How long QEMU may take to end when its machine has moved.
const END_PATIENCE: Duration = Duration::from_secs(30);
const END_INTERVAL: Duration = Duration::from_millis(50);

/// The disks of a machine, served to the other host until this is dropped.
pub(crate) struct PullSource {
    /// Dropped first: afterwards, another process may hold the record.
    _server: DiskServer,
    images: Vec<ServedImage>,
    /// Stamps of the images when they were given up.
    stamps: Mutex<Option<Vec<Option<String>>>>,
    note: PullNote,
    clock: Arc<dyn Clock>,
}

/// A disk, its image here, and how it is served.
struct ServedImage {
    disk: PulledDisk,
    image: ImageFile,
    served: Arc<ServedDisk>,
}

/// Whether a machine may use an image while it is served.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ImageUse {
    /// Its machine runs here. What is read is not used before the image was given up.
    ByMachine,
    /// Nothing writes to it until this process ends.
    AtRest,
}

impl PullSource {
    /// Serves the images that `note` describes.
    ///
    /// # Errors
    /// An image cannot be read, something uses or has changed it, or the other host does not make its sockets.
    pub(crate) fn start(
        disks: Vec<(PulledDisk, ImageFile)>,
        image_use: ImageUse,
        note: PullNote,
        tools: &MigrationTools<'_>,
    ) -> Result<Self> {
        let started = Self::serve(disks, image_use, &note, tools);
        if started.is_err() && image_use == ImageUse::ByMachine {
            // The machine stays here.
            note.forget().ok();
        }
        let (images, server) = started?;
        Ok(Self {
            images,
            stamps: Mutex::new(note.stamps.clone()),
            note,
            clock: Arc::clone(&tools.clock),
            _server: server,
        })
    }

    fn serve(
        disks: Vec<(PulledDisk, ImageFile)>,
        image_use: ImageUse,
        note: &PullNote,
        tools: &MigrationTools<'_>,
    ) -> Result<(Vec<ServedImage>, DiskServer)> {
        let images = disks.into_iter().map(|(disk, image)| {
            let device = match image_use {
                ImageUse::ByMachine => image.open()?,
                ImageUse::AtRest => image.open_at_rest()?,
            };
            let served = Arc::new(ServedDisk::new(Arc::new(device)));
            Ok(ServedImage { disk, image, served })
        });
        let images: Vec<ServedImage> = images.collect::<Result<_>>()?;
        if image_use == ImageUse::AtRest {
            check_stamps(&images, note.stamps.as_deref(), &note.record)?;
        }
        let sockets = images.iter().map(|image| ServedSocket {
            export: image.disk.export.clone(),
            socket: image.disk.socket.clone(),
            disk: Arc::clone(&image.served),
        });
        let link = Arc::clone(&tools.pull.link);
        let server = DiskServer::start(sockets.collect(), link, Arc::clone(&tools.clock), tools.far.host())?;
        Ok((images, server))
    }

    /// Waits until QEMU has given all images up, and serves what they contain then. False if `end` was set before.
    ///
    /// No lock is taken: the machine may have to be resumed here.
    pub(crate) fn wait_for_release(&self, end: &AtomicBool) -> Result<bool> {
        for image in &self.images {
            while image.image.is_open_for_writing()? {
                if end.load(Ordering::Acquire) {
                    return Ok(false);
                }
                self.clock.sleep(RELEASE_INTERVAL);
            }
        }
        for image in &self.images {
            image.served.switch(Arc::new(image.image.open()?));
        }
        let stamps: Vec<Option<String>> = self.images.iter().map(|image| stamp_of(&image.image.path)).collect();
        self.note.note_release(&stamps)?;
        *self.stamps() = Some(stamps);
        Ok(true)
    }

    /// The machine runs there: nothing may write to its images here from now on.
    ///
    /// # Errors
    /// Something has written to them, or may.
    pub(crate) fn lock(&self) -> Result<()> {
        self.note.sync()?;
        let until = self.clock.now() + END_PATIENCE;
        for image in &self.images {
            let locked = loop {
                match image.image.open_at_rest() {
                    Err(_) if self.clock.now() < until => self.clock.sleep(END_INTERVAL),
                    opened => break opened,
                }
            };
            let locked = locked.map_err(|error| changed(image, &self.note.record, error_text(&error)))?;
            image.served.switch(Arc::new(locked));
        }
        check_stamps(&self.images, self.stamps().as_deref(), &self.note.record)
    }

    fn stamps(&self) -> MutexGuard<'_, Option<Vec<Option<String>>>> {
        self.stamps.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The disks, and the bytes that were read of each.
    pub(crate) fn disks(&self) -> impl Iterator<Item = (&PulledDisk, u64, u64)> {
        self.images
            .iter()
            .map(|image| (&image.disk, image.served.size_bytes(), image.served.read_bytes()))
    }

    /// The disks here are not needed any more.
    pub(crate) fn forget(&self) -> Result<()> {
        Ok(self.note.forget()?)
    }
}

/// # Errors
/// An image was written or replaced since it was given up.
fn check_stamps(images: &[ServedImage], stamps: Option<&[Option<String>]>, record: &PullRecord) -> Result<()> {
    for image in images {
        let number = record.disks.iter().position(|disk| disk.disk == image.disk.target);
        let stamp = number
            .zip(stamps)
            .and_then(|(number, stamps)| stamps.get(number))
            .cloned();
        if stamp != Some(stamp_of(&image.image.path)) {
            let reason = format!("{} was written or replaced since", image.image.path.display());
            return Err(changed(image, record, reason));
        }
    }
    Ok(())
}

fn changed(image: &ServedImage, record: &PullRecord, reason: String) -> Error {
    Error::SourceChanged {
        machine: record.machine.clone(),
        disk: image.disk.target.clone(),
        reason,
    }
}
