//! File systems in files, unmounted on drop.

use std::fs::{File, create_dir};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

/// A mounted file system.
pub(crate) struct Mount {
    point: PathBuf,
    _folder: TempDir,
}

impl Mount {
    /// Creates a file system of 512 MiB with `program`; none if that is not possible, with a printed reason.
    pub(crate) fn new(program: &str, arguments: &[&str], options: &str) -> Option<Self> {
        let mount = if is_root() {
            Self::try_new(program, arguments, options)
        } else {
            Err("mounting takes root".to_owned())
        };
        mount.inspect_err(|reason| println!("skipped {program}: {reason}")).ok()
    }

    fn try_new(program: &str, arguments: &[&str], options: &str) -> Result<Self, String> {
        let folder = TempDir::new().map_err(|error| error.to_string())?;
        let (image, point) = (folder.path().join("image"), folder.path().join("mounted"));
        File::create(&image)
            .and_then(|file| file.set_len(512 << 20))
            .and_then(|()| create_dir(&point))
            .map_err(|error| error.to_string())?;
        run(Command::new(program).args(arguments).arg(&image))?;
        run(Command::new("mount")
            .args(["-o", &format!("loop,{options}")])
            .arg(&image)
            .arg(&point))?;
        Ok(Self { point, _folder: folder })
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.point.join(name)
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        if let Err(reason) = run(Command::new("umount").arg(&self.point)) {
            // A failed test may have files open, which end with the program.
            println!("{reason}");
            run(Command::new("umount").arg("--lazy").arg(&self.point)).ok();
        }
    }
}

/// Runs a program that must succeed, and returns its output.
pub(crate) fn run(command: &mut Command) -> Result<Vec<u8>, String> {
    let program = command.get_program().display().to_string();
    let output = command.output().map_err(|error| format!("{program}: {error}"))?;
    if output.status.success() {
        return Ok(output.stdout);
    }
    let reason = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    Err(format!("{program}: {reason}"))
}

pub(crate) fn is_root() -> bool {
    Path::new("/proc/self").metadata().is_ok_and(|own| own.uid() == 0)
}
