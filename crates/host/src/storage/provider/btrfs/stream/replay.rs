//! A simple model of `btrfs receive`, for tests and fuzzers of the gate.

use std::collections::BTreeMap;

use super::command::{Command, Key, Verb};

/// The kind of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReplayedKind {
    File,
    Folder,
    Symlink,
}

/// All paths of the stream, and their kinds.
pub(crate) type Files = BTreeMap<Vec<u8>, ReplayedKind>;

/// Executes commands that have passed the gate. Stops where `btrfs receive` would fail.
///
/// # Panics
/// A command would touch something outside the subvolume, or create a forbidden file.
pub(crate) fn replay(commands: &[Command], mut files: Files) {
    for command in commands.iter().skip(1) {
        check_form(command);
        if apply(command, &mut files).is_none() {
            return;
        }
    }
}

/// Conditions on every command, independent of existing files.
fn check_form(command: &Command) {
    let paths = [Key::Path, Key::PathTo, Key::ClonePath].map(|key| command.value(key));
    for path in paths.into_iter().filter(|path| !path.is_empty()) {
        let names = path.split(|byte| *byte == b'/');
        assert!(!path.contains(&0), "{command:?}");
        for name in names {
            assert!(!matches!(name, b"" | b"." | b".."), "{command:?}");
        }
    }
    let is_forbidden = matches!(
        command.verb,
        Verb::Subvolume | Verb::Snapshot | Verb::UpdateExtent | Verb::MakeNode | Verb::MakeFifo | Verb::MakeSocket
    );
    assert!(!is_forbidden, "{command:?} has passed");
    match command.verb {
        Verb::Chmod => assert_eq!(command.number(Key::Mode) & !0o1777, 0, "{command:?}"),
        Verb::SetXattr | Verb::RemoveXattr => {
            let name = command.value(Key::XattrName);
            assert!(
                !name.starts_with(b"security.") && !name.starts_with(b"trusted."),
                "{command:?}"
            );
        }
        _ => {}
    }
}

/// Checks that all parents of a path are folders. None if the command fails.
fn reach(path: &[u8], files: &Files) -> Option<()> {
    for (at, _) in path.iter().enumerate().filter(|(_, byte)| **byte == b'/') {
        let kind = files.get(&path[..at])?;
        assert_ne!(
            *kind,
            ReplayedKind::Symlink,
            "{:?} leads through a link",
            String::from_utf8_lossy(path)
        );
        (*kind == ReplayedKind::Folder).then_some(())?;
    }
    Some(())
}

fn apply(command: &Command, files: &mut Files) -> Option<()> {
    let path = command.value(Key::Path);
    if path.is_empty() {
        return Some(());
    }
    reach(path, files)?;
    let is_free = |path: &[u8], files: &Files| (!files.contains_key(path)).then_some(());
    let is_data = |path: &[u8], files: &Files| {
        let kind = files.get(path)?;
        assert_ne!(*kind, ReplayedKind::Symlink, "{command:?} follows a link");
        (*kind == ReplayedKind::File).then_some(())
    };
    match command.verb {
        Verb::MakeFile => {
            // The path is opened, and an existing file is truncated.
            assert_ne!(
                files.get(path),
                Some(&ReplayedKind::Symlink),
                "{command:?} follows a link"
            );
            files.insert(path.to_vec(), ReplayedKind::File);
        }
        Verb::MakeFolder => {
            is_free(path, files)?;
            files.insert(path.to_vec(), ReplayedKind::Folder);
        }
        Verb::Symlink => {
            is_free(path, files)?;
            files.insert(path.to_vec(), ReplayedKind::Symlink);
        }
        Verb::Rename => return rename(path, command.value(Key::PathTo), files),
        Verb::Link => {
            let from = command.value(Key::PathLink);
            reach(from, files)?;
            is_free(path, files)?;
            let kind = *files.get(from).filter(|kind| **kind != ReplayedKind::Folder)?;
            files.insert(path.to_vec(), kind);
        }
        Verb::Unlink | Verb::RemoveFolder => {
            let is_folder = command.verb == Verb::RemoveFolder;
            let below = [path, b"/"].concat();
            let is_empty = !files.keys().any(|known| known.starts_with(&below));
            let kind = files.get(path)?;
            (is_empty && (*kind == ReplayedKind::Folder) == is_folder).then_some(())?;
            files.remove(path);
        }
        Verb::Write | Verb::Truncate => return is_data(path, files),
        Verb::Clone => {
            is_data(path, files)?;
            return is_data(command.value(Key::ClonePath), files);
        }
        Verb::Chmod => assert_ne!(files.get(path)?, &ReplayedKind::Symlink, "{command:?} follows a link"),
        _ => drop(files.get(path)?),
    }
    Some(())
}

fn rename(from: &[u8], to: &[u8], files: &mut Files) -> Option<()> {
    reach(to, files)?;
    let kind = *files.get(from)?;
    let inside = |path: &[u8]| path == from || path.starts_with(&[from, b"/"].concat());
    if inside(to) || files.keys().any(|path| path.starts_with(&[to, b"/"].concat())) {
        return None;
    }
    match files.get(to) {
        Some(ReplayedKind::Folder) if kind != ReplayedKind::Folder => return None,
        Some(other) if kind == ReplayedKind::Folder && *other != ReplayedKind::Folder => return None,
        _ => {}
    }
    let moved: Vec<Vec<u8>> = files.keys().filter(|path| inside(path)).cloned().collect();
    files.remove(to);
    for path in moved {
        let kind = files.remove(&path)?;
        files.insert([to, &path[from.len()..]].concat(), kind);
    }
    Some(())
}
