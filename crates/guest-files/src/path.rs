//! Paths inside a guest's file system: from a path to a node, through the guest's symbolic links.

use crate::{DirectoryEntry, Error, FileKind, FileSystem, Metadata, NodeId, Result};

/// Most symbolic links that one path may lead through, as in Linux.
pub const LINK_COUNT_MAX: usize = 40;
/// Most components of a path with all links expanded.
const COMPONENT_COUNT_MAX: usize = 4096;

/// The node of a path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResolvedPath {
    /// The node.
    pub node: NodeId,
    /// Its metadata.
    pub metadata: Metadata,
    /// The names as they are stored, from the root.
    pub names: Vec<Vec<u8>>,
}

/// Finds the node at `path`, whose components are separated by `/`. Links in it are followed inside the file system,
/// as in a guest whose root it is; a link that is the last component is followed only if a `/` ends the path.
pub fn resolve_path(file_system: &mut dyn FileSystem, path: &[u8]) -> Result<ResolvedPath> {
    let mut left: Vec<Vec<u8>> = components(path);
    let follows_last = path.ends_with(b"/");
    let mut parents: Vec<ResolvedPath> = Vec::new();
    let mut current = ResolvedPath {
        node: file_system.root(),
        metadata: file_system.metadata(file_system.root())?,
        names: Vec::new(),
    };
    let mut link_count = 0;
    while let Some(name) = left.pop() {
        if current.metadata.kind != FileKind::Directory {
            return Err(Error::NotADirectory);
        }
        if name == b".." {
            current = parents.pop().unwrap_or(current);
            continue;
        }
        let entry = find_entry(file_system, current.node, &name)?;
        let metadata = file_system.metadata(entry.node)?;
        if metadata.kind == FileKind::Link && (follows_last || !left.is_empty()) {
            link_count += 1;
            if link_count > LINK_COUNT_MAX {
                return Err(Error::LinkLoop);
            }
            let target = file_system.read_link(entry.node)?;
            if target.starts_with(b"/")
                && let Some(root) = parents.drain(..).next()
            {
                current = root;
            }
            left.extend(components(&target));
            if left.len() > COMPONENT_COUNT_MAX {
                return Err(Error::LinkLoop);
            }
            continue;
        }
        let mut names = current.names.clone();
        names.push(entry.name);
        parents.push(current);
        current = ResolvedPath {
            node: entry.node,
            metadata,
            names,
        };
    }
    Ok(current)
}

/// The components of a path, last first.
fn components(path: &[u8]) -> Vec<Vec<u8>> {
    let names = path.split(|byte| *byte == b'/');
    let names = names.filter(|name| !name.is_empty() && *name != b".");
    names.rev().map(<[u8]>::to_vec).collect()
}

/// The entry of this name; in a file system that ignores case, an entry of another case if it is the only one.
fn find_entry(file_system: &mut dyn FileSystem, directory: NodeId, name: &[u8]) -> Result<DirectoryEntry> {
    let folded = file_system.ignores_case().then(|| fold(name));
    let mut exact = None;
    let mut similar: Vec<DirectoryEntry> = Vec::new();
    file_system.read_directory(directory, &mut |entry| {
        if entry.name == name {
            exact.get_or_insert(entry);
        } else if similar.len() < 2 && folded.as_ref().is_some_and(|folded| *folded == fold(&entry.name)) {
            similar.push(entry);
        }
        Ok(())
    })?;
    match (exact, similar.pop()) {
        (Some(entry), _) => Ok(entry),
        (None, Some(entry)) if similar.is_empty() => Ok(entry),
        _ => Err(Error::NotFound),
    }
}

fn fold(name: &[u8]) -> String {
    String::from_utf8_lossy(name).to_lowercase()
}
