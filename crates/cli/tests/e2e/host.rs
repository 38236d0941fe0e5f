//! Loop devices and small file systems. They need root; without it, tests print that they are skipped.

use std::path::{Path, PathBuf};

pub(crate) use holdfast_test_kit::file_systems::system;

/// Prints why a test is skipped.
#[expect(clippy::print_stdout, reason = "a test that is skipped says why")]
pub(crate) fn skipped(reason: &str) {
    println!("skipped: {reason}");
}

pub(crate) fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// A loop device over a file; detached on drop.
pub(crate) struct LoopDevice {
    pub(crate) path: PathBuf,
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        system("losetup", &["--detach", text(&self.path)]).unwrap();
    }
}

/// A loop device over a new file at `file`; `None`, with the reason printed, if this host cannot create one.
pub(crate) fn loop_device(file: &Path, size_bytes: u64) -> Option<LoopDevice> {
    loop_device_of_sectors(file, size_bytes, 512)
}

/// A loop device with sectors of `sector_bytes`.
pub(crate) fn loop_device_of_sectors(file: &Path, size_bytes: u64, sector_bytes: u32) -> Option<LoopDevice> {
    if !rustix::process::geteuid().is_root() {
        skipped("a loop device needs root");
        return None;
    }
    std::fs::File::create(file).unwrap().set_len(size_bytes).unwrap();
    let sector = format!("--sector-size={sector_bytes}");
    match system("losetup", &["--find", "--show", &sector, text(file)]) {
        Ok(path) => Some(LoopDevice { path: path.into() }),
        Err(reason) => {
            skipped(&format!("no loop device: {reason}"));
            None
        }
    }
}

/// A small file system; unmounted on drop.
pub(crate) struct SmallFileSystem {
    pub(crate) path: PathBuf,
    device: LoopDevice,
}

impl Drop for SmallFileSystem {
    fn drop(&mut self) {
        system("umount", &[text(&self.path)]).unwrap();
    }
}

impl SmallFileSystem {
    /// The block device with the file system.
    pub(crate) fn device(&self) -> &Path {
        &self.device.path
    }

    /// Remounts it with these options.
    pub(crate) fn remount(&self, options: &str) {
        system("mount", &["-o", &format!("remount,{options}"), text(&self.path)]).unwrap();
    }
}

/// An ext4 file system of `size_bytes`, mounted at the new folder `mount_point`; `None`, with the reason printed, if
/// this host cannot create one.
pub(crate) fn small_file_system(mount_point: &Path, size_bytes: u64) -> Option<SmallFileSystem> {
    file_system("ext4", mount_point, size_bytes)
}

/// A file system of another kind: `xfs` or `btrfs`, which support clones with shared blocks.
pub(crate) fn file_system(kind: &str, mount_point: &Path, size_bytes: u64) -> Option<SmallFileSystem> {
    let device = loop_device(&mount_point.with_extension(kind), size_bytes)?;
    std::fs::create_dir(mount_point).unwrap();
    let options: &[&str] = match kind {
        "ext4" => &["-q", "-m", "0"],
        "xfs" => &["-q", "-m", "reflink=1"],
        _ => &["-q"],
    };
    let program = format!("mkfs.{kind}");
    system(&program, &[options, &[text(&device.path)]].concat()).unwrap();
    if let Err(reason) = system("mount", &[text(&device.path), text(mount_point)]) {
        skipped(&format!("no mount: {reason}"));
        return None;
    }
    Some(SmallFileSystem {
        path: mount_point.to_owned(),
        device,
    })
}
