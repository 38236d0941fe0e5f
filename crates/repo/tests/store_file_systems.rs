//! The directory store keeps its promises on the file systems that people use.
//!
//! Each file system is made in a file and mounted; that takes root, and the tools to make it. Where they are missing the
//! test says so and passes.
#![expect(
    clippy::disallowed_methods,
    reason = "file systems are made and mounted by their own programs"
)]
#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "this is a test, and says what it skips"
)]

use std::fs::{File, create_dir};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use holdfast_repo::store::{DirectoryStore, conformance};
use tempfile::TempDir;

/// A mounted file system, unmounted when dropped.
struct Mount {
    point: PathBuf,
    _folder: TempDir,
}

impl Mount {
    /// Makes a file system with `program` and mounts it; says why if that cannot be.
    fn new(program: &str, arguments: &[&str], size_bytes: u64) -> Result<Self, String> {
        let folder = TempDir::new().map_err(|error| error.to_string())?;
        let image = folder.path().join("image");
        let point = folder.path().join("mounted");
        File::create(&image)
            .and_then(|file| file.set_len(size_bytes))
            .and_then(|()| create_dir(&point))
            .map_err(|error| error.to_string())?;
        run(Command::new(program).args(arguments).arg(&image))?;
        run(Command::new("mount").args(["-o", "loop"]).arg(&image).arg(&point))?;
        Ok(Self { point, _folder: folder })
    }

    fn remount(&self, option: &str) -> Result<(), String> {
        run(Command::new("mount").args(["-o", option]).arg(&self.point))
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        if let Err(reason) = run(Command::new("umount").arg(&self.point)) {
            println!("{reason}");
        }
    }
}

fn run(command: &mut Command) -> Result<(), String> {
    let output = command
        .output()
        .map_err(|error| format!("{}: {error}", command.get_program().display()))?;
    if output.status.success() {
        return Ok(());
    }
    let reason = String::from_utf8_lossy(&output.stderr);
    Err(format!("{}: {}", command.get_program().display(), reason.trim()))
}

fn is_root() -> bool {
    Path::new("/proc/self").metadata().is_ok_and(|own| own.uid() == 0)
}

fn check_on(program: &str, arguments: &[&str], size_bytes: u64) {
    if !is_root() {
        println!("skipped {program}: mounting takes root");
        return;
    }
    let mount = match Mount::new(program, arguments, size_bytes) {
        Ok(mount) => mount,
        Err(reason) => {
            println!("skipped {program}: {reason}");
            return;
        }
    };
    let mut number = 0;
    let mut make = || {
        number += 1;
        DirectoryStore::create(&mount.point.join(number.to_string())).unwrap()
    };
    conformance::check(&mut || Arc::new(make()));

    let store = make();
    conformance::fill(&store);
    drop(store);
    mount.remount("remount,ro").unwrap();
    let store = DirectoryStore::open(&mount.point.join(number.to_string())).unwrap();
    conformance::check_read_only(&store);
}

#[test]
fn ext4() {
    check_on("mkfs.ext4", &["-q"], 512 << 20);
}

#[test]
fn xfs() {
    check_on("mkfs.xfs", &["-q"], 512 << 20);
}

#[test]
fn btrfs() {
    check_on("mkfs.btrfs", &["-q"], 512 << 20);
}

/// No hard links: objects come to their names by a rename that does not replace.
#[test]
fn fat_has_no_hard_links() {
    check_on("mkfs.vfat", &[], 256 << 20);
}
