//! Processes of others, as far as the kernel tells of them: a QEMU at the other end of its monitor, an swtpm.
//!
//! Source: proc(5), namespaces(7).

use std::path::{Path, PathBuf};

use rustix::process::Pid;

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

    /// Whether its paths lead to other files than ours, as far as we may know: it is in a mount namespace of its own.
    pub(crate) fn sees_other_files(&self) -> bool {
        let namespace = |folder: &Path| std::fs::read_link(folder.join("ns/mnt")).ok();
        namespace(&self.folder).is_some_and(|its| Some(its) != namespace("/proc/self".as_ref()))
    }

    /// The process of this number, if it looks like a QEMU: a socket may have been made by whoever started it.
    pub(crate) fn of_qemu(pid: Pid) -> Option<Self> {
        let process = Self {
            folder: format!("/proc/{}", pid.as_raw_nonzero()).into(),
        };
        let program = std::fs::read_link(process.folder.join("exe")).ok();
        // Only who may trace it may see which program it is.
        let program = program.or_else(|| Some(process.command_line()?.first()?.into()))?;
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

#[cfg(test)]
mod tests {
    use super::Process;

    #[test]
    fn a_process_that_is_no_qemu_is_not_taken_for_one() {
        assert!(Process::of_qemu(rustix::process::getpid()).is_none());
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
