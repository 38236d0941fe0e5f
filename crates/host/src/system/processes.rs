//! Who is at work on this host, as far as the kernel tells (proc(5)).

use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

/// A process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Living {
    /// Its number.
    pub process: u32,
    /// The words that it was started with.
    pub words: Vec<String>,
}

/// The processes that were started as the program `name`, but for this one; none where those of others cannot be seen.
pub fn living(name: &str) -> Option<Vec<Living>> {
    let mut found = Vec::new();
    for (process, folder) in processes()? {
        let Ok(bytes) = std::fs::read(folder.join("cmdline")) else {
            continue;
        };
        let words = words_of(&bytes);
        let program = words.first().and_then(|word| Path::new(word).file_name());
        if program.is_some_and(|program| program == name) && process != std::process::id() {
            found.push(Living { process, words });
        }
    }
    Some(found)
}

/// The words that a process was started with; none where there is none, or nobody may see them.
pub fn words_of_process(process: u32) -> Vec<String> {
    let bytes = std::fs::read(format!("/proc/{process}/cmdline"));
    words_of(&bytes.unwrap_or_default())
}

/// The process that started another one; none where that has ended.
pub fn parent_of(process: u32) -> Option<u32> {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    parent_in(&status)
}

fn parent_in(status: &str) -> Option<u32> {
    let line = status.lines().find_map(|line| line.strip_prefix("PPid:"))?;
    line.trim().parse().ok()
}

/// Whether a process has a file at `folder` or below it open; none where not all can be asked.
pub fn open_below(folder: &Path) -> Option<bool> {
    let mut is_complete = true;
    for (_, process) in processes()? {
        let files = match std::fs::read_dir(process.join("fd")) {
            Ok(files) => files,
            // It has ended.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
            Err(_) => {
                is_complete = false;
                continue;
            }
        };
        let mut targets = files.flatten().filter_map(|file| std::fs::read_link(file.path()).ok());
        if targets.any(|target| target.starts_with(folder)) {
            return Some(true);
        }
    }
    is_complete.then_some(false)
}

/// The processes, but for this one, that have a block device open for writing, as far as they can be asked. They may know it by another
/// name: libvirt's machines have devices of their own, on which locks of the one that we know say nothing.
///
/// `device` is its number, as stat(2) tells it.
pub fn writers_of_device(device: u64) -> Vec<Living> {
    let mut found = Vec::new();
    for (process, folder) in processes().into_iter().flatten() {
        let files = std::fs::read_dir(folder.join("fd")).into_iter().flatten().flatten();
        let writes = |name: &std::ffi::OsStr| {
            let metadata = std::fs::metadata(folder.join("fd").join(name));
            let is_it = metadata.is_ok_and(|found| found.file_type().is_block_device() && found.rdev() == device);
            is_it && std::fs::read_to_string(folder.join("fdinfo").join(name)).is_ok_and(|info| is_for_writing(&info))
        };
        if process != std::process::id() && files.into_iter().any(|file| writes(&file.file_name())) {
            found.push(Living {
                process,
                words: words_of_process(process),
            });
        }
    }
    found
}

/// Processes that have files open for writing.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Writers {
    /// Those that were found.
    pub found: Vec<Living>,
    /// Whether there are no others: those of other users can be seen by root alone.
    pub is_complete: bool,
}

/// The processes, but for this one, that have one of these files open for writing. For programs that lock nothing, as VirtualBox.
pub fn writers_of_files(paths: &[PathBuf]) -> Writers {
    let identity = |path: &Path| path.metadata().ok().map(|file| (file.dev(), file.ino()));
    let files: Vec<(u64, u64)> = paths.iter().filter_map(|path| identity(path)).collect();
    let Some(processes) = processes() else {
        return Writers::default();
    };
    let mut writers = Writers {
        found: Vec::new(),
        is_complete: true,
    };
    for (process, folder) in processes {
        if process == std::process::id() {
            continue;
        }
        let opened = match std::fs::read_dir(folder.join("fd")) {
            Ok(opened) => opened,
            // It has ended.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
            Err(_) => {
                writers.is_complete = false;
                continue;
            }
        };
        let writes = |name: &std::ffi::OsStr| {
            identity(&folder.join("fd").join(name)).is_some_and(|file| files.contains(&file))
                && std::fs::read_to_string(folder.join("fdinfo").join(name)).is_ok_and(|info| is_for_writing(&info))
        };
        if opened.flatten().any(|file| writes(&file.file_name())) {
            writers.found.push(Living {
                process,
                words: words_of_process(process),
            });
        }
    }
    writers
}

/// Whether somebody has a lock on a file, as QEMU has on every image that it uses; false where nobody can tell.
///
/// Nothing is locked to find out: a machine that starts at this moment would be refused its image.
pub fn is_locked_by_others(path: &Path) -> bool {
    has_lock(path, is_of_image)
}

/// Whether somebody has a lock on a file as QEMU has on every image that it may write to; false where nobody can tell.
///
/// One that is only read, as a base that machines share, is not meant.
pub fn is_written_by_others(path: &Path) -> bool {
    has_lock(path, is_of_writer)
}

fn has_lock(path: &Path, is_meant: fn(&str, &str) -> bool) -> bool {
    let (Ok(found), Ok(locks)) = (path.metadata(), std::fs::read_to_string("/proc/locks")) else {
        return false;
    };
    let device = found.dev();
    let file = format!(
        "{:02x}:{:02x}:{}",
        rustix::fs::major(device),
        rustix::fs::minor(device),
        found.ino()
    );
    locks.lines().any(|line| is_meant(line, &file))
}

/// `1: OFDLCK ADVISORY  READ -1 fd:00:1234 100 101`: not the locks that are called flock, which programs use for other ends.
fn is_of_image(line: &str, file: &str) -> bool {
    let words: Vec<&str> = line.split_whitespace().collect();
    matches!(words[..], [_, "OFDLCK" | "POSIX", _, _, _, locked, ..] if locked == file)
}

/// The byte that QEMU locks where it may write: that of permissions and the bit of this one (`block/file-posix.c`).
const WRITER_BYTE: u64 = 101;

/// The same of somebody who writes: a lock for writing, or a shared one that QEMU tells so by.
fn is_of_writer(line: &str, file: &str) -> bool {
    let words: Vec<&str> = line.split_whitespace().collect();
    let [_, _, _, kind, _, _, start, end] = words[..] else {
        return false;
    };
    let has_byte = || {
        let start = start.parse::<u64>().is_ok_and(|start| start <= WRITER_BYTE);
        start && (end == "EOF" || end.parse::<u64>().is_ok_and(|end| end >= WRITER_BYTE))
    };
    is_of_image(line, file) && (kind == "WRITE" || has_byte())
}

/// Whether the flags of an open file, in octal digits, are those of one that is written.
fn is_for_writing(info: &str) -> bool {
    let flags = info.lines().find_map(|line| line.strip_prefix("flags:"));
    let flags = flags.and_then(|digits| u32::from_str_radix(digits.trim(), 8).ok());
    flags.is_some_and(|flags| flags & 0o3 != 0)
}

/// The words of a command line as the kernel tells them.
fn words_of(bytes: &[u8]) -> Vec<String> {
    let words = bytes.split(|byte| *byte == 0).filter(|word| !word.is_empty());
    words.map(|word| String::from_utf8_lossy(word).into_owned()).collect()
}

/// All processes, and their folders.
fn processes() -> Option<Vec<(u32, PathBuf)>> {
    // Where /proc hides the processes of others, it hides the first one.
    if !rustix::process::geteuid().is_root() && !Path::new("/proc/1/cmdline").exists() {
        return None;
    }
    let entries = std::fs::read_dir("/proc").ok()?;
    let numbered = entries.flatten().filter_map(|entry| {
        let process = entry.file_name().to_str()?.parse().ok()?;
        Some((process, entry.path()))
    });
    Some(numbered.collect())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{is_for_writing, is_locked_by_others, is_of_image, is_of_writer, living, open_below, writers_of_files};
    use crate::Companion;

    #[test]
    fn an_open_file_is_seen_and_we_do_not_count_ourselves() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().canonicalize().unwrap();
        let file = std::fs::File::create(folder.join("open")).unwrap();
        assert_eq!(open_below(&folder), Some(true));
        drop(file);
        assert_ne!(open_below(&folder), Some(true));
        let found = living("holdfast-of-nobody").unwrap_or_default();
        assert!(found.is_empty());
        assert_eq!(super::parent_in("Name:\tx\nPPid:\t17\nTracerPid:\t0\n"), Some(17));
        assert!(super::parent_of(std::process::id()).is_some());
    }

    #[test]
    fn who_writes_a_file_is_found_without_a_lock() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let paths = [file.path().to_owned(), "/nowhere".into()];
        let ours = writers_of_files(&paths);
        assert_eq!(ours.found, [], "we do not count ourselves");
        let script = format!("exec 9>>'{}'; echo ready; read end", file.path().display());
        let mut other = Companion::start(&"sh".into(), &["-c".into(), script.into()]).unwrap();
        assert_eq!(other.hear(Duration::from_secs(30)).as_deref(), Some("ready"));
        let found = writers_of_files(&paths).found;
        assert_eq!((found.len(), &found[0].words[0][..]), (1, "sh"));
        other.tell("end").unwrap();
        other.end().unwrap();
        assert_eq!(writers_of_files(&paths), ours);
        let script = format!("exec 9<'{}'; echo ready; read end", file.path().display());
        let other = Companion::start(&"sh".into(), &["-c".into(), script.into()]).unwrap();
        assert_eq!(other.hear(Duration::from_secs(30)).as_deref(), Some("ready"));
        assert_eq!(writers_of_files(&paths).found, [], "one that reads writes nothing");
        other.end().unwrap();
    }

    #[test]
    fn who_writes_and_who_locks_is_told_as_the_kernel_tells_it() {
        assert!(is_for_writing("pos:\t0\nflags:\t0100002\nmnt_id:\t1"));
        assert!(!is_for_writing("pos:\t0\nflags:\t0100000\n") && !is_for_writing("nonsense"));
        let lock = |kind: &str, file: &str| format!("1: {kind}  ADVISORY  READ -1 {file} 100 101");
        assert!(is_of_image(&lock("OFDLCK", "fd:00:1234"), "fd:00:1234"));
        assert!(is_of_image(&lock("POSIX", "fd:00:1234"), "fd:00:1234"));
        assert!(!is_of_image(&lock("FLOCK", "fd:00:1234"), "fd:00:1234"));
        assert!(!is_of_image(&lock("OFDLCK", "fd:00:12345"), "fd:00:1234"));
        let locked = |kind: &str, range: &str| format!("1: OFDLCK  ADVISORY  {kind} -1 fd:00:1234 {range}");
        for (kind, range, writes) in [
            ("READ", "100 101", true),
            ("READ", "101 103", true),
            ("READ", "100 100", false),
            ("READ", "103 203", false),
            ("READ", "0 EOF", true),
            ("WRITE", "0 0", true),
        ] {
            assert_eq!(
                is_of_writer(&locked(kind, range), "fd:00:1234"),
                writes,
                "{kind} {range}"
            );
        }
        let file = tempfile::NamedTempFile::new().unwrap();
        assert!(!is_locked_by_others(file.path()));
        rustix::fs::fcntl_lock(&file, rustix::fs::FlockOperation::LockExclusive).unwrap();
        assert!(is_locked_by_others(file.path()));
    }
}
