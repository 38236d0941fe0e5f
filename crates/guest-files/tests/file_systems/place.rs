//! A folder with an image, and the image mounted.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use holdfast_block::{FileDevice, IoMode};
use holdfast_guest_files::{CachedDevice, DiskSource, FileSystem, open_file_system};
use tempfile::TempDir;

const PATH: &str = "/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Runs a program, which must succeed; returns its output.
pub(crate) fn system(program: &str, words: &[&str]) -> String {
    match try_system(program, words) {
        Ok(output) => output,
        Err(reason) => panic!("{program} {words:?}: {reason} (scripts/setup installs what tests need)"),
    }
}

/// Runs a program; an error is its error output.
pub(crate) fn try_system(program: &str, words: &[&str]) -> Result<String, String> {
    let output = Command::new(program).args(words).env("PATH", PATH).output();
    let output = output.map_err(|error| format!("it does not start: {error}"))?;
    if output.status.success() {
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    } else {
        Err(String::from_utf8_lossy(&output.stderr).into_owned())
    }
}

pub(crate) fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Deleted on drop.
pub(crate) struct Place {
    folder: TempDir,
}

impl Place {
    /// A folder with an empty image.
    pub(crate) fn new(image_bytes: u64) -> Self {
        let place = Self {
            folder: tempfile::tempdir().unwrap(),
        };
        File::create(place.image()).unwrap().set_len(image_bytes).unwrap();
        place
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// A new folder.
    pub(crate) fn folder(&self, name: &str) -> PathBuf {
        let path = self.path(name);
        std::fs::create_dir_all(&path).unwrap();
        path
    }

    pub(crate) fn image(&self) -> PathBuf {
        self.path("image")
    }

    /// The disks of the image.
    pub(crate) fn disks(&self) -> Vec<DiskSource> {
        vec![disk("vda", &self.image())]
    }

    /// The file system that fills the image.
    pub(crate) fn open(&self) -> Box<dyn FileSystem> {
        open_image(&self.image()).unwrap()
    }

    /// Mounts the image; none without root or where the kernel cannot.
    pub(crate) fn mount(&self, words: &[&str]) -> Option<MountedImage> {
        let point = self.folder("mounted");
        let image = self.image();
        let all = [words, &[text(&image), text(&point)]].concat();
        match try_system("mount", &all) {
            Ok(_) => Some(MountedImage { point }),
            Err(reason) => {
                println!("skipped: {reason}");
                None
            }
        }
    }
}

pub(crate) fn disk(name: &str, path: &Path) -> DiskSource {
    DiskSource {
        name: name.to_owned(),
        device: Arc::new(FileDevice::open(path, IoMode::Buffered).unwrap()),
    }
}

/// The file system that fills the image at a path.
pub(crate) fn open_image(path: &Path) -> holdfast_guest_files::Result<Box<dyn FileSystem>> {
    let disks = [disk("vda", path)];
    let found = holdfast_guest_files::find_volumes(&disks).unwrap();
    assert_eq!(found.notes, Vec::<String>::new());
    assert_eq!(found.volumes.len(), 1, "{found:?}");
    let volume = &found.volumes[0];
    let device = CachedDevice::new(volume.device(&disks), 8 << 20);
    open_file_system(Arc::new(device), volume.content)
}

/// Unmounted on drop.
pub(crate) struct MountedImage {
    point: PathBuf,
}

impl MountedImage {
    pub(crate) fn point(&self) -> &Path {
        &self.point
    }
}

impl Drop for MountedImage {
    fn drop(&mut self) {
        if let Err(reason) = try_system("umount", &[text(&self.point)]) {
            println!("{reason}");
            try_system("umount", &["--lazy", text(&self.point)]).ok();
        }
    }
}
