//! Processes of others, as far as the kernel tells of them: a QEMU at the other end of its monitor, an swtpm.
//!
//! Source: proc(5), namespaces(7).

use std::path::{Path, PathBuf};

use rustix::process::Pid;

use crate::system::rights::UserIdentity;

/// Bytes of a command line, at most: the kernel's own bound for one is a quarter of the stack.
const COMMAND_LINE_BYTES_MAX: usize = 4 << 20;

/// A process.
pub(crate) struct Process {
    folder: PathBuf,
}

impl Process {
    /// All that there are at this moment.
    pub(crate) fn all() -> impl Iterator<Item = Self> {
        let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
        let numbers = entries.filter(|entry| {
            let name = entry.file_name();
            name.as_encoded_bytes().iter().all(u8::is_ascii_digit)
        });
        numbers.map(|entry| Self { folder: entry.path() })
    }

    /// The one of this number.
    pub(crate) fn of_number(pid: Pid) -> Self {
        Self {
            folder: format!("/proc/{}", pid.as_raw_nonzero()).into(),
        }
    }

    /// Whether its paths lead to other files than ours, as far as we may know: it has another root, or a mount namespace of its own.
    pub(crate) fn sees_other_files(&self) -> bool {
        ["ns/mnt", "root"].iter().any(|name| {
            let target = |folder: &Path| std::fs::read_link(folder.join(name)).ok();
            target(&self.folder).is_some_and(|its| Some(its) != target("/proc/self".as_ref()))
        })
    }

    /// Its user and groups, for access checks. A program that is root only by its set-user-id bit was started by another user, who chose
    /// its arguments: that user counts.
    pub(crate) fn identity(&self) -> Option<UserIdentity> {
        let status = std::fs::read_to_string(self.folder.join("status")).ok()?;
        identity(&status)
    }

    /// The program that it runs, as the kernel knows it; none where we may not see that.
    pub(crate) fn program(&self) -> Option<PathBuf> {
        std::fs::read_link(self.folder.join("exe")).ok()
    }

    /// Whether it has one of these sockets open; none where we may not see that.
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

    /// The process of this number, if it looks like a QEMU: a socket may have been made by whoever started it.
    pub(crate) fn of_qemu(pid: Pid) -> Option<Self> {
        let process = Self::of_number(pid);
        // Only who may trace it may see which program it is.
        let program = process
            .program()
            .or_else(|| Some(process.command_line()?.first()?.into()))?;
        let name = program.file_name()?.to_string_lossy();
        (name.contains("qemu") || name == "kvm").then_some(process)
    }

    /// Whether it has ended, be it that nobody has asked for its exit code yet.
    pub(crate) fn has_ended(&self) -> bool {
        match std::fs::read_to_string(self.folder.join("stat")) {
            // The state stands behind the name in brackets, which may have any character in it.
            Ok(stat) => stat
                .rsplit_once(')')
                .is_some_and(|(_, rest)| rest.trim_start().starts_with(['Z', 'X'])),
            Err(error) => error.kind() == std::io::ErrorKind::NotFound,
        }
    }

    /// What it was started with, where we may see it.
    pub(crate) fn command_line(&self) -> Option<Vec<String>> {
        let bytes = std::fs::read(self.folder.join("cmdline")).ok()?;
        if bytes.is_empty() || bytes.len() > COMMAND_LINE_BYTES_MAX {
            return None;
        }
        let words = bytes.strip_suffix(&[0]).unwrap_or(&bytes).split(|byte| *byte == 0);
        Some(words.map(|word| String::from_utf8_lossy(word).into_owned()).collect())
    }

    /// A path as the process means it: relative ones are so to its own folder.
    pub(crate) fn resolve(&self, path: &Path) -> PathBuf {
        if path.is_absolute() {
            return path.to_owned();
        }
        std::fs::read_link(self.folder.join("cwd")).map_or_else(|_| path.to_owned(), |folder| folder.join(path))
    }
}

/// The user of a process by its `/proc/PID/status`: real, effective, saved and file-system user stand in one line.
fn identity(status: &str) -> Option<UserIdentity> {
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

/// The inodes of sockets that are bound to `path`, as the process that bound them called it, with that name.
pub(crate) fn bound_sockets() -> Vec<(PathBuf, u64)> {
    let text = std::fs::read("/proc/net/unix").unwrap_or_default();
    String::from_utf8_lossy(&text)
        .lines()
        .filter_map(bound_socket)
        .collect()
}

/// A line of `/proc/net/unix`: six numbers, the inode and, where there is one, the name.
fn bound_socket(line: &str) -> Option<(PathBuf, u64)> {
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
    use std::os::unix::net::UnixListener;

    use super::{Process, bound_sockets, identity};

    #[test]
    fn a_process_that_is_no_qemu_is_not_taken_for_one() {
        assert!(Process::of_qemu(rustix::process::getpid()).is_none());
    }

    #[test]
    fn the_user_who_started_a_program_counts_and_not_its_set_user_id_bit() {
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
    fn who_holds_a_socket_is_told_by_the_kernel() {
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
    fn this_process_is_one_of_all_and_sees_its_own_files() {
        let own = std::env::args().collect::<Vec<_>>();
        let ours = Process::all().find(|process| process.command_line().as_ref() == Some(&own));
        assert!(!ours.unwrap().sees_other_files());
    }

    #[test]
    fn a_command_line_is_its_words() {
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
