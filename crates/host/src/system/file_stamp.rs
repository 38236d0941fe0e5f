//! The identity of a file and its content: a stamp that changes when either changes.

use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::Path;

/// A word that stays the same as long as a file is neither replaced nor written; of a volume, as long as it is not replaced. None where
/// nothing like that can be told.
///
/// A file may be moved or mounted elsewhere: the word has its inode, its size and when it was written last.
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
    fn a_file_that_was_written_or_replaced_has_another_stamp() {
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
        // A name is no part of it.
        let replaced = stamp_of(&path).unwrap();
        std::fs::rename(&path, &other).unwrap();
        assert_eq!(stamp_of(&other), Some(replaced));
        assert_eq!(stamp_of(&path), None);
        assert_eq!(stamp_of(folder.path()), None);
        assert_eq!(stamp_of(Path::new("/dev/null")), None);
    }
}
