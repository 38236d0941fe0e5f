//! Compares a file system with a folder of the host.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::Path;

use holdfast_guest_files::{FileKind, FilePiece, FileSystem, Metadata, NodeId};

/// What is compared beside names, kinds and bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Attributes {
    /// Permissions, owners and times.
    Unix,
    /// Nothing.
    None,
}

/// Asserts that the file system holds exactly what the folder holds. Names in `ignored` are left out on both sides.
pub(crate) fn assert_same(
    file_system: &mut dyn FileSystem,
    folder: &Path,
    attributes: Attributes,
    ignored: &[&str],
) -> usize {
    let mut count = 0;
    let mut left = vec![(folder.to_owned(), file_system.root())];
    while let Some((folder, node)) = left.pop() {
        let guest = list(file_system, node);
        let host = std::fs::read_dir(&folder)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_vec());
        let is_meant = |name: &Vec<u8>| !ignored.iter().any(|other| other.as_bytes() == name);
        let host: BTreeSet<Vec<u8>> = host.filter(is_meant).collect();
        let names: BTreeSet<Vec<u8>> = guest.keys().filter(|name| is_meant(name)).cloned().collect();
        let lost = host
            .symmetric_difference(&names)
            .map(|name| String::from_utf8_lossy(name))
            .collect::<Vec<_>>();
        assert!(lost.is_empty(), "{}: {lost:?}", folder.display());
        for name in host {
            let path = folder.join(std::ffi::OsStr::from_bytes(&name));
            let node = guest[&name];
            let metadata = file_system.metadata(node).unwrap();
            compare_metadata(&metadata, &path, attributes);
            count += 1;
            match metadata.kind {
                FileKind::Directory => left.push((path, node)),
                FileKind::File => assert!(
                    content(file_system, node) == std::fs::read(&path).unwrap(),
                    "the bytes of {} differ",
                    path.display()
                ),
                FileKind::Link => assert_eq!(
                    file_system.read_link(node).unwrap(),
                    std::fs::read_link(&path).unwrap().into_os_string().into_vec()
                ),
                FileKind::Special => {}
            }
        }
    }
    count
}

fn compare_metadata(metadata: &Metadata, path: &Path, attributes: Attributes) {
    let host = std::fs::symlink_metadata(path).unwrap();
    let kind = host.file_type();
    let expected = if kind.is_dir() {
        FileKind::Directory
    } else if kind.is_symlink() {
        FileKind::Link
    } else if kind.is_file() {
        FileKind::File
    } else {
        assert!(kind.is_fifo());
        FileKind::Special
    };
    assert_eq!(metadata.kind, expected, "{}", path.display());
    if kind.is_file() || kind.is_symlink() {
        assert_eq!(metadata.size_bytes, host.len(), "{}", path.display());
    }
    match attributes {
        Attributes::Unix => {
            assert_eq!(metadata.mode, Some(host.mode() & 0o7777), "{}", path.display());
            assert_eq!((metadata.uid, metadata.gid), (Some(host.uid()), Some(host.gid())));
            let modified = metadata.modified.unwrap();
            let found = (modified.seconds, i64::from(modified.nanoseconds));
            assert_eq!(found, (host.mtime(), host.mtime_nsec()), "{}", path.display());
        }
        Attributes::None => {}
    }
}

/// The entries of a directory.
pub(crate) fn list(file_system: &mut dyn FileSystem, node: NodeId) -> BTreeMap<Vec<u8>, NodeId> {
    let mut entries = BTreeMap::new();
    let mut visit = |entry: holdfast_guest_files::DirectoryEntry| {
        assert!(entries.insert(entry.name, entry.node).is_none(), "a name occurs twice");
        Ok(())
    };
    file_system.read_directory(node, &mut visit).unwrap();
    entries
}

/// All bytes of a file.
pub(crate) fn content(file_system: &mut dyn FileSystem, node: NodeId) -> Vec<u8> {
    let mut bytes = Vec::new();
    loop {
        match file_system.read_file(node, bytes.len() as u64, 100_000).unwrap() {
            FilePiece::End => return bytes,
            FilePiece::Data(piece) => bytes.extend(piece),
            FilePiece::Hole(length) => bytes.resize(bytes.len() + usize::try_from(length).unwrap(), 0),
        }
    }
}

/// The node at a path.
pub(crate) fn node_at(file_system: &mut dyn FileSystem, path: &str) -> NodeId {
    holdfast_guest_files::resolve_path(file_system, path.as_bytes())
        .unwrap()
        .node
}
