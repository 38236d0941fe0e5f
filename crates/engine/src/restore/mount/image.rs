//! A disk image as a file with its raw disk.

use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use holdfast_block::BlockDevice;
use holdfast_image::{Format, OpenOptions};
use holdfast_serve::fuse::{Directory, FileContent, FuseServer, TreeEntry};
use holdfast_serve::nbd::ExportDevice;

use super::{LOOK_INTERVAL, MountPlace};
use crate::image::source::OpenSource;
use crate::job::{Error, Job, Progress, Result};

/// The interval between two checks whether the image has changed.
const CHANGE_INTERVAL: Duration = Duration::from_secs(5);

/// What is mounted of an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MountedImage {
    /// The name of the file.
    pub file: String,
    /// The format of the image.
    pub format: Format,
    /// Size of the disk in bytes.
    pub size_bytes: u64,
}

impl MountedImage {
    pub(super) fn of(path: &Path, format: Format, size_bytes: u64) -> Self {
        let stem = path.file_stem().unwrap_or(path.as_os_str());
        Self {
            file: format!("{}.raw", stem.to_string_lossy()),
            format,
            size_bytes,
        }
    }
}

/// An image that can be mounted. It is not changed.
pub struct ImageMount {
    image: OpenSource,
}

impl ImageMount {
    /// Opens an image and its backing images.
    pub fn open(path: &Path, options: &OpenOptions) -> Result<Self> {
        let image = OpenSource::open_with(path, options).map_err(|error| error.on(path))?;
        Ok(Self { image })
    }

    /// Warns of a doubtful format, and of inconsistent metadata.
    pub fn warn(&self, progress: &dyn Progress) -> Result<()> {
        self.image.warn_of_format(None, progress);
        self.image.warn_of_inconsistencies(progress)
    }

    /// What a mount shows.
    pub fn content(&self) -> MountedImage {
        let size_bytes = self.image.device.size_bytes();
        MountedImage::of(&self.image.canonical, self.image.format, size_bytes)
    }

    /// Mounts the disk until it is unmounted, which is the normal end, or until the job is interrupted. `ready` is called
    /// when the file can be read.
    pub fn serve(&self, place: &MountPlace, job: Job<'_>, ready: &mut dyn FnMut()) -> Result<()> {
        let file_error = |source| Error::File {
            action: "mount",
            path: self.image.canonical.clone(),
            source,
        };
        let metadata = self.image.canonical.metadata().map_err(file_error)?;
        let modified_ms = metadata.mtime().saturating_mul(1000);
        let name = self.content().file;
        let mut root = Directory::new(modified_ms);
        let content = Arc::new(ImageContent {
            name: name.clone(),
            device: Arc::clone(&self.image.device),
        });
        let entry = TreeEntry::File { content, modified_ms };
        root.insert(name, entry)
            .map_err(|error| file_error(std::io::Error::other(error)))?;
        place.serve(&root, job, &mut |server, _| {
            ready();
            watch(&self.image, server, job);
        })
    }
}

/// Warns once if another program changes the image.
fn watch(image: &OpenSource, server: &FuseServer, job: Job<'_>) {
    let (mut checked, mut is_changed) = (job.clock.now(), false);
    while !server.is_ended() && job.interrupt.check().is_ok() {
        job.clock.sleep(LOOK_INTERVAL);
        if is_changed || job.clock.now() < checked + CHANGE_INTERVAL {
            continue;
        }
        checked = job.clock.now();
        if let Some((path, change)) = image.changes().unwrap_or_default().into_iter().next() {
            is_changed = true;
            job.progress.warning(&format!(
                "{} was changed while it was mounted ({change}): reads may return data of different times",
                path.display()
            ));
        }
    }
}

struct ImageContent {
    name: String,
    device: Arc<dyn BlockDevice>,
}

impl FileContent for ImageContent {
    fn size_bytes(&self) -> u64 {
        self.device.size_bytes()
    }

    fn identity(&self) -> String {
        self.name.clone()
    }

    fn open(&self) -> std::io::Result<ExportDevice> {
        Ok(ExportDevice::ReadOnly(Arc::clone(&self.device)))
    }
}
