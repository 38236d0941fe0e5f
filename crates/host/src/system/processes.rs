//! Processes of this host: their command lines, parents and open files.
//!
//! Source: proc(5), namespaces(7).

use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use rustix::process::Pid;

/// A process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProcessInfo {
    /// The process id.
    pub pid: u32,
    /// The command line.
    pub arguments: Vec<String>,
}

/// The running processes of the program `name`, except for this process; none if processes of other users are hidden.
pub fn processes_named(name: &str) -> Option<Vec<ProcessInfo>> {
    let mut found = Vec::new();
    for (process, folder) in processes()? {
        let Ok(bytes) = std::fs::read(folder.join("cmdline")) else {
            continue;
        };
        let words = split_arguments(&bytes);
        let program = words.first().and_then(|word| Path::new(word).file_name());
        if program.is_some_and(|program| program == name) && process != std::process::id() {
            found.push(ProcessInfo {
                pid: process,
                arguments: words,
            });
        }
    }
    Some(found)
}

/// The command line of a process; empty if the process does not exist or the command line is not readable.
pub fn command_line_of(process: u32) -> Vec<String> {
    let bytes = std::fs::read(format!("/proc/{process}/cmdline"));
    split_arguments(&bytes.unwrap_or_default())
}

/// The parent of a process; none if the process has ended.
pub fn parent_of(process: u32) -> Option<u32> {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    parent_in(&status)
}

fn parent_in(status: &str) -> Option<u32> {
    let line = status.lines().find_map(|line| line.strip_prefix("PPid:"))?;
    line.trim().parse().ok()
}

/// Whether a process has a file at or below `folder` open; none if some processes cannot be inspected.
pub fn open_below(folder: &Path) -> Option<bool> {
    let mut is_complete = true;
    for (_, process) in processes()? {
        let files = match std::fs::read_dir(process.join("fd")) {
            Ok(files) => files,
            // The process has ended.
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

/// The processes, except for this process, that have a block device open for writing, as far as they can be
/// inspected. They may use another path for it: libvirt's machines have separate device nodes, so locks on the host's
/// node show nothing.
///
/// `device` is the device number of stat(2).
pub fn writers_of_device(device: u64) -> Vec<ProcessInfo> {
    let mut found = Vec::new();
    for (process, folder) in processes().into_iter().flatten() {
        let files = std::fs::read_dir(folder.join("fd")).into_iter().flatten().flatten();
        let writes = |name: &std::ffi::OsStr| {
            let metadata = std::fs::metadata(folder.join("fd").join(name));
            let is_same_device =
                metadata.is_ok_and(|found| found.file_type().is_block_device() && found.rdev() == device);
            is_same_device
                && std::fs::read_to_string(folder.join("fdinfo").join(name)).is_ok_and(|info| is_for_writing(&info))
        };
        if process != std::process::id() && files.into_iter().any(|file| writes(&file.file_name())) {
            found.push(ProcessInfo {
                pid: process,
                arguments: command_line_of(process),
            });
        }
    }
    found
}

/// Processes that have files open for writing.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Writers {
    /// The processes.
    pub found: Vec<ProcessInfo>,
    /// Whether the list is complete. Only root can inspect processes of other users.
    pub is_complete: bool,
}

/// How a file is open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum FileAccess {
    Any,
    Writing,
}

/// The processes, except for this process, that have one of these files open for writing. Intended for programs that
/// take no locks, such as VirtualBox.
pub fn writers_of_files(paths: &[PathBuf]) -> Writers {
    users_of_files(paths, FileAccess::Writing)
}

/// The processes, except for this process, that have a file open. A QEMU that waits for a machine opens its images only for
/// reading, and takes no locks.
pub fn users_of_file(path: &Path) -> Writers {
    users_of_files(&[path.to_owned()], FileAccess::Any)
}

fn users_of_files(paths: &[PathBuf], access: FileAccess) -> Writers {
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
            // The process has ended.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
            Err(_) => {
                writers.is_complete = false;
                continue;
            }
        };
        let writes = |name: &std::ffi::OsStr| {
            identity(&folder.join("fd").join(name)).is_some_and(|file| files.contains(&file))
                && (access == FileAccess::Any
                    || std::fs::read_to_string(folder.join("fdinfo").join(name))
                        .is_ok_and(|info| is_for_writing(&info)))
        };
        if opened.flatten().any(|file| writes(&file.file_name())) {
            writers.found.push(ProcessInfo {
                pid: process,
                arguments: command_line_of(process),
            });
        }
    }
    writers
}

/// Whether another process locks a file, as QEMU does with every image that it uses; false if unknown.
///
/// The check takes no lock: a lock would make the start of a machine at this moment fail.
pub fn is_locked_by_others(path: &Path) -> bool {
    has_lock(path, is_of_image)
}

/// Whether another process locks a file for writing, as QEMU does with every image that it may write; false if unknown.
///
/// Locks for reading, as on a base image that several machines share, do not count.
pub fn is_written_by_others(path: &Path) -> bool {
    has_lock(path, is_of_writer)
}

fn has_lock(path: &Path, is_wanted: fn(&str, &str) -> bool) -> bool {
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
    locks.lines().any(|line| is_wanted(line, &file))
}

/// Whether a line describes a lock on this file that QEMU may hold: `1: OFDLCK ADVISORY  READ -1 fd:00:1234 100 101`.
/// Locks by flock do not count, since programs use them for other purposes.
fn is_of_image(line: &str, file: &str) -> bool {
    let words: Vec<&str> = line.split_whitespace().collect();
    matches!(words[..], [_, "OFDLCK" | "POSIX", _, _, _, locked, ..] if locked == file)
}

/// The byte that QEMU locks to announce that it may write: the base of the permissions plus the bit of this
/// permission (`block/file-posix.c`).
const WRITER_BYTE: u64 = 101;

/// Whether a line describes the lock of a writer: an exclusive lock, or a shared lock on QEMU's writer byte.
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

/// Whether the flags of an open file, in octal, include write access.
fn is_for_writing(info: &str) -> bool {
    let flags = info.lines().find_map(|line| line.strip_prefix("flags:"));
    let flags = flags.and_then(|digits| u32::from_str_radix(digits.trim(), 8).ok());
    flags.is_some_and(|flags| flags & 0o3 != 0)
}

/// Splits a command line as the kernel provides it into arguments.
fn split_arguments(bytes: &[u8]) -> Vec<String> {
    let words = bytes.split(|byte| *byte == 0).filter(|word| !word.is_empty());
    words.map(|word| String::from_utf8_lossy(word).into_owned()).collect()
}

/// All processes, with their /proc folders.
fn processes() -> Option<Vec<(u32, PathBuf)>> {
    // If /proc hides processes of other users, process 1 is hidden.
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

/// A user with the groups that are relevant for access checks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UserIdentity {
    /// The user.
    pub user: u32,
    /// The primary group.
    pub group: u32,
    /// Supplementary groups.
    pub groups: Vec<u32>,
}

/// Limit on the bytes of a command line: the kernel's own limit is a quarter of the stack.
pub(crate) const COMMAND_LINE_BYTES_MAX: usize = 4 << 20;

pub(crate) struct Process {
    folder: PathBuf,
}

impl Process {
    /// All current processes.
    pub(crate) fn all() -> impl Iterator<Item = Self> {
        let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
        let numbers = entries.filter(|entry| {
            let name = entry.file_name();
            name.as_encoded_bytes().iter().all(u8::is_ascii_digit)
        });
        numbers.map(|entry| Self { folder: entry.path() })
    }

    /// The process with this id.
    pub(crate) fn of_number(pid: Pid) -> Self {
        Self {
            folder: format!("/proc/{}", pid.as_raw_nonzero()).into(),
        }
    }

    /// The process id.
    pub(crate) fn number(&self) -> Option<u32> {
        self.folder.file_name()?.to_str()?.parse().ok()
    }

    /// Whether the paths of the process may refer to other files than in this process: it has another root directory
    /// or mount namespace, or this is unknown.
    pub(crate) fn sees_other_files(&self) -> bool {
        ["ns/mnt", "root"].iter().any(|name| {
            let target = |folder: &Path| std::fs::read_link(folder.join(name)).ok();
            target(&self.folder).is_some_and(|its| Some(its) != target("/proc/self".as_ref()))
        })
    }

    /// The user and groups of the process, for access checks. For a set-user-id program, the user who started it is
    /// returned, since that user chose the arguments.
    pub(crate) fn identity(&self) -> Option<UserIdentity> {
        let status = std::fs::read_to_string(self.folder.join("status")).ok()?;
        identity(&status)
    }

    /// The executable, as the kernel reports it; none if it cannot be inspected.
    pub(crate) fn program(&self) -> Option<PathBuf> {
        std::fs::read_link(self.folder.join("exe")).ok()
    }

    /// Whether the process has one of these sockets open; none if this cannot be inspected.
    pub(crate) fn has_socket(&self, inodes: &[u64]) -> Option<bool> {
        let mut entries = std::fs::read_dir(self.folder.join("fd")).ok()?.flatten();
        Some(entries.any(|entry| {
            let target = std::fs::read_link(entry.path()).ok();
            let target = target.as_deref().and_then(Path::to_str).unwrap_or_default();
            let inode = target.strip_prefix("socket:[").and_then(|rest| rest.strip_suffix(']'));
            inode
                .and_then(|inode| inode.parse().ok())
                .is_some_and(|inode| inodes.contains(&inode))
        }))
    }

    /// The process with this id, if it runs a QEMU: any program may have created a socket.
    pub(crate) fn of_qemu(pid: Pid) -> Option<Self> {
        let process = Self::of_number(pid);
        // Only a process with the right to trace it can read the executable.
        let program = process
            .program()
            .or_else(|| Some(process.command_line()?.first()?.into()))?;
        let name = program.file_name()?.to_string_lossy();
        (name.contains("qemu") || name == "kvm").then_some(process)
    }

    /// Whether the process has ended. A zombie counts as ended.
    pub(crate) fn has_ended(&self) -> bool {
        match std::fs::read_to_string(self.folder.join("stat")) {
            // The state follows the name in parentheses, which may contain any character.
            Ok(stat) => stat
                .rsplit_once(')')
                .is_some_and(|(_, rest)| rest.trim_start().starts_with(['Z', 'X'])),
            Err(error) => error.kind() == std::io::ErrorKind::NotFound,
        }
    }

    /// The command line, if it can be inspected.
    pub(crate) fn command_line(&self) -> Option<Vec<String>> {
        let bytes = std::fs::read(self.folder.join("cmdline")).ok()?;
        if bytes.is_empty() || bytes.len() > COMMAND_LINE_BYTES_MAX {
            return None;
        }
        let words = bytes.strip_suffix(&[0]).unwrap_or(&bytes).split(|byte| *byte == 0);
        Some(words.map(|word| String::from_utf8_lossy(word).into_owned()).collect())
    }

    /// Resolves a path of the process: relative paths are relative to its working directory.
    pub(crate) fn resolve(&self, path: &Path) -> PathBuf {
        if path.is_absolute() {
            return path.to_owned();
        }
        std::fs::read_link(self.folder.join("cwd")).map_or_else(|_| path.to_owned(), |folder| folder.join(path))
    }
}

/// Parses the user in `/proc/PID/status`: one line has the real, effective, saved and file-system ids.
pub(crate) fn identity(status: &str) -> Option<UserIdentity> {
    let line = |name: &str| {
        let mut lines = status.lines();
        let values = lines.find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        values
            .split_ascii_whitespace()
            .map(|word| word.parse().ok())
            .collect::<Option<Vec<u32>>>()
    };
    let (users, own_groups) = (line("Uid")?, line("Gid")?);
    let index = users.iter().position(|user| *user != 0).unwrap_or(0);
    Some(UserIdentity {
        user: *users.get(index)?,
        group: *own_groups.get(index)?,
        groups: line("Groups")?,
    })
}

/// Bound UNIX sockets: the path as the binding process gave it, and the inode.
pub(crate) fn bound_sockets() -> Vec<(PathBuf, u64)> {
    let text = std::fs::read("/proc/net/unix").unwrap_or_default();
    String::from_utf8_lossy(&text)
        .lines()
        .filter_map(bound_socket)
        .collect()
}

/// Parses a line of `/proc/net/unix`: six numbers, the inode and, optionally, the path.
pub(crate) fn bound_socket(line: &str) -> Option<(PathBuf, u64)> {
    let mut rest = line;
    let mut fields = Vec::new();
    for _ in 0..7 {
        let (field, behind) = rest.trim_start_matches(' ').split_once(' ')?;
        fields.push(field);
        rest = behind;
    }
    Some((rest.into(), fields.last()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use crate::system::processes::{Process, bound_sockets, identity};
    use std::os::unix::net::UnixListener;
    use std::time::Duration;

    use super::{
        is_for_writing, is_locked_by_others, is_of_image, is_of_writer, open_below, processes_named, writers_of_files,
    };
    use crate::LineProcess;

    #[test]
    fn an_open_file_is_found_except_our_own() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().canonicalize().unwrap();
        let file = std::fs::File::create(folder.join("open")).unwrap();
        assert_eq!(open_below(&folder), Some(true));
        drop(file);
        assert_ne!(open_below(&folder), Some(true));
        let found = processes_named("holdfast-missing").unwrap_or_default();
        assert!(found.is_empty());
        assert_eq!(super::parent_in("Name:\tx\nPPid:\t17\nTracerPid:\t0\n"), Some(17));
        assert!(super::parent_of(std::process::id()).is_some());
    }

    #[test]
    fn writers_of_a_file_are_found_without_locks() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let paths = [file.path().to_owned(), "/nowhere".into()];
        let ours = writers_of_files(&paths);
        assert_eq!(ours.found, [], "we do not count ourselves");
        let script = format!("exec 9>>'{}'; echo ready; read end", file.path().display());
        let mut other = LineProcess::start(&"sh".into(), &["-c".into(), script.into()]).unwrap();
        assert_eq!(other.receive_line(Duration::from_secs(30)).as_deref(), Some("ready"));
        let found = writers_of_files(&paths).found;
        assert_eq!((found.len(), &found[0].arguments[0][..]), (1, "sh"));
        other.send_line("end").unwrap();
        other.close().unwrap();
        assert_eq!(writers_of_files(&paths), ours);
        let script = format!("exec 9<'{}'; echo ready; read end", file.path().display());
        let other = LineProcess::start(&"sh".into(), &["-c".into(), script.into()]).unwrap();
        assert_eq!(other.receive_line(Duration::from_secs(30)).as_deref(), Some("ready"));
        assert_eq!(writers_of_files(&paths).found, [], "one that reads writes nothing");
        other.close().unwrap();
    }

    #[test]
    fn open_flags_and_lock_lines_of_the_kernel_are_parsed() {
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

    #[test]
    fn a_process_of_another_program_is_not_taken_for_qemu() {
        assert!(Process::of_qemu(rustix::process::getpid()).is_none());
    }

    #[test]
    fn the_real_user_of_a_set_user_id_program_counts() {
        let status = |users: &str| format!("Name:\tx\nUid:\t{users}\nGid:\t{users}\nGroups:\t4 27 \n");
        let user = |users: &str| identity(&status(users)).unwrap().user;
        assert_eq!(user("0\t0\t0\t0"), 0);
        assert_eq!(user("1000\t0\t0\t0"), 1000);
        assert_eq!(user("0\t64055\t0\t64055"), 64_055);
        assert_eq!(identity(&status("1\t1\t1\t1")).unwrap().groups, [4, 27]);
        assert_eq!(identity("Uid:\tx\n"), None);
        let own = Process::of_number(rustix::process::getpid()).identity().unwrap();
        assert_eq!(own.user, rustix::process::geteuid().as_raw());
    }

    #[test]
    fn the_holder_of_a_socket_is_found() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a b");
        let inodes = || {
            let bound = bound_sockets().into_iter().filter(|(name, _)| *name == path);
            bound.map(|(_, inode)| inode).collect::<Vec<_>>()
        };
        let own = Process::of_number(rustix::process::getpid());
        assert!(inodes().is_empty());
        let _listener = UnixListener::bind(&path).unwrap();
        assert_eq!(own.has_socket(&inodes()), Some(true));
        assert_eq!(own.has_socket(&[]), Some(false));
    }

    #[test]
    fn this_process_is_listed_and_sees_the_same_files() {
        let own = std::env::args().collect::<Vec<_>>();
        let ours = Process::all().find(|process| process.command_line().as_ref() == Some(&own));
        assert!(!ours.unwrap().sees_other_files());
    }

    #[test]
    fn a_command_line_is_split_into_arguments() {
        let process = Process {
            folder: "/proc/self".into(),
        };
        let words: Vec<String> = std::env::args().collect();
        assert!(!process.has_ended());
        let gone = Process {
            folder: "/proc/4194305".into(),
        };
        assert!(gone.has_ended());
        assert_eq!(process.command_line().unwrap(), words);
        let here = std::env::current_dir().unwrap();
        assert_eq!(process.resolve("a".as_ref()), here.join("a"));
        assert_eq!(process.resolve("/a".as_ref()), std::path::Path::new("/a"));
    }
}
