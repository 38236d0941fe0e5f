//! Who is at work on this host, as far as the kernel tells (proc(5)).

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
        let words = bytes.split(|byte| *byte == 0).filter(|word| !word.is_empty());
        let words: Vec<String> = words.map(|word| String::from_utf8_lossy(word).into_owned()).collect();
        let program = words.first().and_then(|word| Path::new(word).file_name());
        if program.is_some_and(|program| program == name) && process != std::process::id() {
            found.push(Living { process, words });
        }
    }
    Some(found)
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
    use super::{living, open_below};

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
    }
}
