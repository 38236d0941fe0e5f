//! The identity of a file and its content: a stamp that changes when either changes.

use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::Path;

/// A stamp that is the same until a file is replaced or written; for a volume, until the volume is replaced. None if
/// the file system provides no suitable data.
///
/// The file may be moved or mounted elsewhere: the stamp consists of inode, size and modification time.
pub fn stamp_of(path: &Path) -> Option<String> {
    let found = path.metadata().ok()?;
    if found.is_file() {
        return Some(format!(
            "{}:{}:{}.{:09}",
            found.ino(),
            found.size(),
            found.mtime(),
            found.mtime_nsec()
        ));
    }
    let device = found.file_type().is_block_device().then(|| found.rdev())?;
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    let identity = std::fs::read_to_string(format!("/sys/dev/block/{major}:{minor}/dm/uuid")).ok()?;
    let identity = identity.trim();
    let is_word = !identity.is_empty() && !identity.contains(|letter: char| letter.is_whitespace() || letter == ',');
    is_word.then(|| identity.to_owned())
}

#[cfg(test)]
mod tests {
    use std::fs::{File, FileTimes};
    use std::path::Path;
    use std::time::{Duration, UNIX_EPOCH};

    use super::stamp_of;

    #[test]
    fn writing_or_replacing_a_file_changes_its_stamp() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("base");
        let write = |path: &Path, text: &str, second: u64| {
            let mut file = File::create(path).unwrap();
            std::io::Write::write_all(&mut file, text.as_bytes()).unwrap();
            let times = FileTimes::new().set_modified(UNIX_EPOCH + Duration::from_secs(second));
            file.set_times(times).unwrap();
        };
        write(&path, "one", 1);
        let first = stamp_of(&path).unwrap();
        assert_eq!(stamp_of(&path), Some(first.clone()));
        write(&path, "two", 2);
        let written = stamp_of(&path).unwrap();
        assert_ne!(first, written);
        let other = folder.path().join("other");
        write(&other, "two", 2);
        std::fs::rename(&other, &path).unwrap();
        assert_ne!(stamp_of(&path).unwrap(), written);
        // The name is not part of the stamp.
        let replaced = stamp_of(&path).unwrap();
        std::fs::rename(&path, &other).unwrap();
        assert_eq!(stamp_of(&other), Some(replaced));
        assert_eq!(stamp_of(&path), None);
        assert_eq!(stamp_of(folder.path()), None);
        assert_eq!(stamp_of(Path::new("/dev/null")), None);
    }
}
