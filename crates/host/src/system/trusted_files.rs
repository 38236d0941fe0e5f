//! Files that control what this program does: configurations, programs that it calls, keys that verify signatures.
//!
//! A user who can write or replace such a file can do everything that Holdfast may do. So sudo, cron and sshd refuse
//! files that users other than root can write. Holdfast does the same, and checks every folder and symbolic link of
//! the path.

use std::fs::Metadata;
use std::io::Result as IoResult;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use rustix::process::geteuid;

const GROUP_WRITES: u32 = 0o020;
const OTHERS_WRITE: u32 = 0o002;
const STICKY: u32 = 0o1000;

/// Why the file at `path` is not trusted; none if no other user can change it.
///
/// A pipe that the caller has opened (`/dev/fd/3`) has no path to check, and belongs to the caller.
pub fn why_untrusted(path: &Path) -> IoResult<Option<String>> {
    let whole = std::path::absolute(path)?;
    if whole.starts_with("/dev/fd") || whole.starts_with("/proc/self/fd") || whole == Path::new("/dev/stdin") {
        return Ok(None);
    }
    let user = geteuid().as_raw();
    let found = whole.metadata()?;
    if !found.is_file() {
        return Ok(Some("it is not a regular file".to_owned()));
    }
    let target = whole.canonicalize()?;
    for path in whole.ancestors().chain(target.ancestors()) {
        if let Some(why) = why_not(&path.symlink_metadata()?, user) {
            let which = if path == whole || path == target {
                String::new()
            } else {
                format!("{}: ", path.display())
            };
            return Ok(Some(format!("{which}{why}")));
        }
    }
    Ok(None)
}

/// Why other users may change or replace the content of a folder; none if they cannot. If the folder does not exist
/// yet, the existing part of its path is checked.
pub fn why_not_private(folder: &Path) -> IoResult<Option<String>> {
    let whole = std::path::absolute(folder)?;
    let user = geteuid().as_raw();
    let mut ancestors = whole.ancestors();
    let existing = ancestors.find(|path| path.symlink_metadata().is_ok()).unwrap_or(&whole);
    let target = existing.canonicalize()?;
    for path in existing.ancestors().chain(target.ancestors()) {
        let found = path.symlink_metadata()?;
        // In a sticky folder, users cannot remove files of other users, but all users may add files.
        let may_add = found.is_dir() && found.mode() & OTHERS_WRITE != 0;
        let why = match why_not(&found, user) {
            None if may_add && (path == whole || path == target && existing == whole) => Some(of_mode(&found)),
            other => other,
        };
        if let Some(why) = why {
            return Ok(Some(format!("{}: {why}", path.display())));
        }
    }
    Ok(None)
}

fn of_mode(found: &Metadata) -> String {
    format!("other users can write it (mode {:03o})", found.mode() & 0o7777)
}

/// Why one file, folder or link is not trusted, if `user` is the trusted user; none if it is trusted.
fn why_not(found: &Metadata, user: u32) -> Option<String> {
    if found.uid() != 0 && found.uid() != user {
        return Some(format!("it belongs to user {}", found.uid()));
    }
    // The mode of a link has no meaning, and in a sticky folder users cannot remove files of other users.
    if found.is_symlink() || found.is_dir() && found.mode() & STICKY != 0 {
        return None;
    }
    // Users often have a private group, but root does not.
    let by_group = found.mode() & GROUP_WRITES != 0 && user == 0 && found.gid() != 0;
    let by_others = found.mode() & OTHERS_WRITE != 0;
    (by_group || by_others).then(|| of_mode(found))
}

#[cfg(test)]
mod tests {
    use std::fs::{File, Permissions};
    use std::os::unix::fs::{PermissionsExt as _, chown, symlink};

    use rustix::process::geteuid;

    use super::{why_not_private, why_untrusted};

    #[test]
    fn a_folder_that_others_can_change_or_replace_is_found() {
        let around = tempfile::tempdir().unwrap();
        let mode = |path: &std::path::Path, mode| std::fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
        let folder = around.path().join("repository");
        let why = || why_not_private(&folder).unwrap();
        // In a sticky folder, users cannot remove files of other users.
        for fine in [0o700, 0o755, 0o1777] {
            mode(around.path(), fine);
            assert_eq!(why(), None, "{fine:o}");
            assert_eq!(why_not_private(&folder.join("deeper")).unwrap(), None);
        }
        mode(around.path(), 0o777);
        assert!(why().unwrap().contains("other users can write it (mode 777)"));
        std::fs::create_dir(&folder).unwrap();
        assert!(why().unwrap().starts_with(around.path().to_str().unwrap()));
        mode(around.path(), 0o755);
        assert_eq!(why(), None);
        for wrong in [0o777, 0o1777] {
            mode(&folder, wrong);
            assert!(why().unwrap().starts_with(folder.to_str().unwrap()), "{wrong:o}");
        }
    }

    #[test]
    fn a_file_that_others_can_change_is_not_trusted() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        File::create(&path).unwrap();
        let mode = |path: &std::path::Path, mode| std::fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
        let why = || why_untrusted(&path).unwrap();
        for fine in [0o600, 0o644, 0o755] {
            mode(&path, fine);
            assert_eq!(why(), None);
        }
        for wrong in [0o602, 0o666] {
            mode(&path, wrong);
            assert!(why().unwrap().contains("other users can write it"));
        }
        mode(&path, 0o600);
        mode(folder.path(), 0o777);
        assert!(why().unwrap().contains("other users can write it"));
        mode(folder.path(), 0o700);
        assert!(why_untrusted(folder.path()).unwrap().is_some());
        assert!(why_untrusted(&folder.path().join("absent")).is_err());
        if !geteuid().is_root() {
            return;
        }
        let link = folder.path().join("link");
        symlink(&path, &link).unwrap();
        assert_eq!(why_untrusted(&link).unwrap(), None);
        chown(&path, Some(65_534), None).unwrap();
        assert!(why_untrusted(&link).unwrap().unwrap().contains("belongs to user 65534"));
        chown(&path, Some(0), Some(65_534)).unwrap();
        assert_eq!(why(), None);
        mode(&path, 0o620);
        assert!(why().is_some());
    }
}
