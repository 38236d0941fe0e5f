//! Determines whether files can be cloned by trying it: no query reports this reliably.
//!
//! The trial uses files without names, so that it is invisible, and a killed process leaves no files. On a file
//! system without such files, small named files are used.

use std::fs::File;
use std::io::{ErrorKind, Write as _};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Mode, OFlags, ioctl_ficlone, openat};
use rustix::io::Errno;

use crate::storage::file_system::{BTRFS, XFS, clone_file, is_on};

/// The content of the cloned file: more than a file system stores inline.
const PROBE: &[u8] = &[0x48; 4096];
/// Prefix and suffixes of the named files.
const PREFIX: &str = ".holdfast-";
const SUFFIXES: [&str; 3] = [".from.partial", ".to.partial", ".probe.partial"];

/// Creates a file without a name; none if the file system does not support that.
fn nameless(folder: &Path) -> std::io::Result<Option<File>> {
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    match openat(CWD, folder, flags, Mode::RUSR | Mode::WUSR) {
        Ok(file) => Ok(Some(file.into())),
        Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

fn named(folder: &Path, label: &str, ending: &str) -> PathBuf {
    folder.join(format!("{PREFIX}{label}{ending}"))
}

/// Why files in a folder cannot be cloned; none if they can be cloned. If the trial needs named files, their names
/// contain `label`. If there is no space for them, the type of the file system decides.
pub fn why_not(folder: &Path, label: &str) -> Option<String> {
    let reason = match try_in(folder, label) {
        Ok(()) => return None,
        Err(error) if error.raw_os_error() == Some(Errno::OPNOTSUPP.raw_os_error()) => {
            "its file system cannot clone files (XFS and btrfs can)".to_owned()
        }
        // Existing snapshots must be found on a full file system, too. Creating a snapshot reports the lack of space.
        Err(error) if error.kind() == ErrorKind::StorageFull && is_on(folder, &[XFS, BTRFS]) => return None,
        Err(error) => error.to_string(),
    };
    Some(format!("files in {} cannot be cloned: {reason}", folder.display()))
}

fn try_in(folder: &Path, label: &str) -> std::io::Result<()> {
    if let (Some(mut from), Some(to)) = (nameless(folder)?, nameless(folder)?) {
        from.write_all(PROBE)?;
        return Ok(ioctl_ficlone(to, from)?);
    }
    let (from, to) = (named(folder, label, SUFFIXES[0]), named(folder, label, SUFFIXES[1]));
    let written = File::create_new(&from).and_then(|mut file| file.write_all(PROBE));
    let made = written.and_then(|()| clone_file(&from, &to));
    for path in [from, to] {
        // The file may not exist.
        drop(std::fs::remove_file(path));
    }
    made
}

/// Whether a file can be cloned to a folder.
pub fn can_clone_to(file: &Path, folder: &Path, label: &str) -> bool {
    match nameless(folder) {
        Err(_) => false,
        Ok(Some(to)) => File::open(file).is_ok_and(|from| ioctl_ficlone(to, from).is_ok()),
        Ok(None) => {
            let probe = named(folder, label, SUFFIXES[2]);
            let is_cloned = clone_file(file, &probe).is_ok();
            // The file may not exist.
            drop(std::fs::remove_file(&probe));
            is_cloned
        }
    }
}

/// Whether a file has the name of a trial file.
pub fn is_probe(name: &str) -> bool {
    SUFFIXES.iter().any(|ending| {
        let label = name.strip_prefix(PREFIX).and_then(|rest| rest.strip_suffix(ending));
        label.is_some_and(|label| !label.is_empty())
    })
}

#[cfg(test)]
mod tests {
    use super::{can_clone_to, is_probe, why_not};

    #[test]
    fn a_trial_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        std::io::Write::write_all(&mut std::fs::File::create(&file).unwrap(), b"x").unwrap();
        // The result depends on the file system. Both methods must return the same result.
        let is_possible = why_not(folder.path(), "a").is_none();
        assert_eq!(can_clone_to(&file, folder.path(), "a"), is_possible);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
        assert!(why_not(&folder.path().join("nowhere"), "a").is_some());
    }

    #[test]
    fn leftover_trial_files_are_recognized_by_name() {
        for name in [
            ".holdfast-0a1b2c3d.from.partial",
            ".holdfast-x.to.partial",
            ".holdfast-17.probe.partial",
        ] {
            assert!(is_probe(name), "{name}");
        }
        for name in [
            ".holdfast-.to.partial",
            "holdfast-x.to.partial",
            ".holdfast-x.to",
            ".web1.0123abcd.partial",
            ".holdfast",
        ] {
            assert!(!is_probe(name), "{name}");
        }
    }
}
