//! Tests with a real block device: a loop device over a file. They need root and `losetup`; without them they print the
//! reason and pass.

#![allow(clippy::print_stdout, reason = "it prints why it did not run")]

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};

use holdfast_block::conformance::{Conformance, contents};
use holdfast_block::{BlockDevice, BlockDeviceMut, Error, ExtentKind, FileDevice, FileDeviceMut, IoMode};

#[expect(clippy::disallowed_methods, reason = "only losetup makes a loop device")]
fn losetup(arguments: &[&str]) -> Result<String, String> {
    let output = Command::new("losetup")
        .args(arguments)
        .output()
        .map_err(|error| format!("losetup does not start: {error}"))?;
    if output.status.success() {
        Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    } else {
        Err(String::from_utf8_lossy(&output.stderr).trim().to_owned())
    }
}

/// A loop device, detached on drop.
struct Loop {
    path: PathBuf,
    _directory: tempfile::TempDir,
    _alone: MutexGuard<'static, ()>,
}

impl Drop for Loop {
    fn drop(&mut self) {
        losetup(&["--detach", self.path.to_str().unwrap()]).unwrap();
    }
}

/// Each test holds this lock while it has a loop device. A child process that another test starts has all files of this
/// process open until it calls exec: until then a device that was just closed is still in use.
static ALONE: Mutex<()> = Mutex::new(());

/// A loop device of `size_bytes` with sectors of `sector_bytes`; `None`, with the reason printed, if this host cannot
/// create one.
fn attach(size_bytes: u64, sector_bytes: u32) -> Option<Loop> {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: a loop device needs root");
        return None;
    }
    let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("disk");
    File::create_new(&file).unwrap().set_len(size_bytes).unwrap();
    let sector = format!("--sector-size={sector_bytes}");
    match losetup(&["--find", "--show", &sector, file.to_str().unwrap()]) {
        Ok(path) => Some(Loop {
            path: path.into(),
            _directory: directory,
            _alone: alone,
        }),
        Err(reason) => {
            println!("skipped: no loop device: {reason}");
            None
        }
    }
}

fn zeroed(path: &Path, mode: IoMode) -> FileDeviceMut {
    let device = FileDeviceMut::open(path, mode).unwrap();
    device.write_zeroes(0..device.size_bytes()).unwrap();
    device
}

#[test]
fn conforms_on_a_loop_device() {
    for sector_bytes in [512, 4096] {
        let Some(disk) = attach(1 << 20, sector_bytes) else {
            return;
        };
        for mode in [IoMode::Buffered, IoMode::Direct] {
            Conformance::new()
                .with_sizes(&[1 << 20])
                .check_mutable(|_| zeroed(&disk.path, mode));
            let reader = FileDevice::open(&disk.path, mode).unwrap();
            assert_eq!(reader.block_size_bytes(), sector_bytes);
            let list = reader.extents(0..1 << 20, 5).unwrap();
            assert_eq!((list.as_slice().len(), list.as_slice()[0].kind), (1, ExtentKind::Data));
            assert!(reader.changed_since_open().unwrap().is_empty());
        }
    }
}

/// The size of the device is no multiple of 4096. Its last sector is accessed with direct and with buffered I/O.
#[test]
fn the_tail_of_a_device_is_read_and_written() {
    let size = (1 << 20) + 3 * 512;
    let Some(disk) = attach(size, 512) else { return };
    let pattern = Conformance::new().pattern(size);
    let device = FileDeviceMut::open(&disk.path, IoMode::Direct).unwrap();
    assert_eq!(device.size_bytes(), size);
    device.write_at(&pattern, 0).unwrap();
    device.flush().unwrap();
    assert!(contents(&device) == pattern);
    device.trim(1000..size - 1).unwrap();
    let after = contents(&device);
    assert!(after[..1000] == pattern[..1000] && after.last() == pattern.last());
    drop(device);
    assert!(contents(&FileDevice::open(&disk.path, IoMode::Buffered).unwrap()) == after);
}

#[test]
fn a_device_in_use_is_not_opened_for_writing() {
    let Some(disk) = attach(1 << 20, 512) else { return };
    let _user = FileDeviceMut::open(&disk.path, IoMode::Direct).unwrap();
    let refused = FileDeviceMut::open(&disk.path, IoMode::Buffered).unwrap_err();
    assert!(matches!(refused, Error::Path { source, .. } if source.kind() == std::io::ErrorKind::ResourceBusy));
    FileDevice::open(&disk.path, IoMode::Buffered).unwrap();
}
