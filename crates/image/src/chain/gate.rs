//! Which other files an image may open.
//!
//! A qcow2 can refer to a backing file and an external data file by any path. An image from an untrusted source (an
//! upload, a guest with access to its own disk file) could refer to `/etc/shadow`, and have it copied into a backup
//! that its author may read. The gate decides by the *canonical* path, after resolving symbolic links and `..`; the
//! file is then opened by that path without following links.

use std::borrow::Cow;
use std::path::{Path, PathBuf};

use crate::file::directory_of;
use crate::{Error, Result};

/// The rule for files that an image refers to.
///
/// Files that the user allowed ([`OpenOptions::allow`](crate::OpenOptions::allow)) are admitted under every rule.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Gate {
    /// No other files.
    Deny,
    /// Files in the folder of the image, but not in its subfolders.
    ///
    /// An image that was opened through a symbolic link has two such folders: that of the link and that of the file.
    #[default]
    SameFolder,
    /// Files in this folder or its subfolders.
    Within(PathBuf),
}

/// A gate for the chain of one image, with the files that the user allowed.
#[derive(Debug, Clone)]
pub(crate) struct Gatekeeper {
    gate: Gate,
    directories: Vec<PathBuf>,
    named: Vec<PathBuf>,
    relocate: Vec<(PathBuf, PathBuf)>,
    /// Images whose format was detected from the content only, with that format: they may refer only to files that the
    /// user allowed.
    guessed: Vec<(PathBuf, &'static str)>,
}

impl Gatekeeper {
    /// A gatekeeper for the chain of `top`, which must exist.
    pub(crate) fn new(gate: &Gate, named: &[PathBuf], top: &Path) -> Result<Self> {
        let canonical = |path: &Path| path.canonicalize().map_err(|source| Error::io("open", path, source));
        let directories = match gate {
            Gate::Deny => Vec::new(),
            Gate::Within(directory) => vec![canonical(directory)?],
            Gate::SameFolder => vec![canonical(&directory_of(top))?, directory_of(&canonical(top)?)],
        };
        let named = named.iter().map(|path| canonical(path)).collect::<Result<_>>()?;
        Ok(Self {
            gate: gate.clone(),
            directories,
            named,
            relocate: Vec::new(),
            guessed: Vec::new(),
        })
    }

    /// Restricts the image at `path`, whose format was detected from its content only, to files that the user allowed.
    pub(crate) fn restrict_to_named(&mut self, path: &Path, format: &'static str) {
        self.guessed.push((path.to_owned(), format));
    }

    /// Sets the folders whose files are looked up elsewhere.
    pub(crate) fn relocating(self, relocate: &[(PathBuf, PathBuf)]) -> Self {
        Self {
            relocate: relocate.to_vec(),
            ..self
        }
    }

    /// The files and folders that the user allowed.
    pub(crate) fn named(&self) -> &[PathBuf] {
        &self.named
    }

    /// The path after relocation.
    fn relocated(&self, path: PathBuf) -> PathBuf {
        for (from, to) in &self.relocate {
            if path.starts_with(to) && path.exists() {
                return path;
            }
            let inside = path.strip_prefix(from).ok().filter(|_| !path.starts_with(to));
            let moved = inside.map(|inside| to.join(inside)).filter(|moved| moved.exists());
            if let Some(moved) = moved {
                return moved;
            }
        }
        path
    }

    /// The canonical path of the file that `image` refers to as `name`, if it may be opened.
    ///
    /// `image` is the path of the image: a relative name starts at its folder.
    pub(crate) fn admit(&self, image: &Path, name: &str) -> Result<PathBuf> {
        let refuse = |detail: String| Error::Refused {
            image: image.display().to_string(),
            file: name.to_owned(),
            detail,
        };
        let guessed = self.guessed.iter().find(|(path, _)| path == image);
        let path = local_path(name).map_err(refuse)?;
        let path = self.relocated(directory_of(image).join(path));
        if let Some((_, format)) = guessed
            && !path.canonicalize().is_ok_and(|canonical| self.admits_named(&canonical))
        {
            return Err(Error::GuessedFormat {
                image: image.display().to_string(),
                format,
                file: name.to_owned(),
            });
        }
        // The rule is checked before the file's existence: errors must not reveal which files exist.
        let canonical = match path.canonicalize() {
            Ok(canonical) => canonical,
            Err(source) => {
                let parent = directory_of(&path);
                let seen = parent.canonicalize().unwrap_or(parent);
                return Err(if self.admits_directory(&seen) || self.admits_named(&seen) {
                    Error::io("open", &path, source)
                } else {
                    refuse(self.rule())
                });
            }
        };
        if self.admits_named(&canonical) || self.admits_directory(&directory_of(&canonical)) {
            Ok(canonical)
        } else {
            Err(refuse(self.rule()))
        }
    }

    /// Whether the user allowed this file, or a folder that contains it.
    fn admits_named(&self, canonical: &Path) -> bool {
        self.named.iter().any(|named| canonical.starts_with(named))
    }

    fn admits_directory(&self, directory: &Path) -> bool {
        match self.gate {
            Gate::Deny => false,
            Gate::SameFolder => self.directories.iter().any(|allowed| allowed == directory),
            Gate::Within(_) => self.directories.iter().any(|allowed| directory.starts_with(allowed)),
        }
    }

    fn rule(&self) -> String {
        match &self.gate {
            Gate::Deny => "no other file may be opened; if you trust the image, allow the file by name".to_owned(),
            Gate::SameFolder => {
                "only files in the folder of the image may be opened; if you trust the image, allow the file by name"
                    .to_owned()
            }
            Gate::Within(directory) => format!(
                "only files in {} may be opened; if you trust the image, allow the file by name",
                directory.display()
            ),
        }
    }
}

/// A file name to store in an image, with the prefix `./` if QEMU would otherwise take a colon for the end of a
/// protocol name.
pub fn plain_name(path: &str) -> Cow<'_, str> {
    let head = path.split('/').next().unwrap_or_default();
    if head.contains(':') {
        Cow::Owned(format!("./{path}"))
    } else {
        Cow::Borrowed(path)
    }
}

/// The path in a file name of QEMU; fails for protocols and option strings.
fn local_path(name: &str) -> std::result::Result<&Path, String> {
    if name.is_empty() {
        return Err("the name is empty".to_owned());
    }
    if name.contains('\0') {
        return Err("the name contains a zero byte".to_owned());
    }
    if name.starts_with("json:") {
        return Err("it is a QEMU option string, not a file; rebase the image onto a plain file name".to_owned());
    }
    if let Some(path) = name.strip_prefix("file:") {
        return Ok(Path::new(
            path.strip_prefix("//")
                .filter(|rest| rest.starts_with('/'))
                .unwrap_or(path),
        ));
    }
    // As in QEMU: a colon before the first slash ends a protocol name.
    let head = name.split('/').next().unwrap_or_default();
    match head.split_once(':') {
        Some((protocol, _)) => Err(format!(
            "it is reached by the protocol {protocol:?}, and only local files are opened; serve it as a local file first"
        )),
        None => Ok(Path::new(name)),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{File, create_dir};
    use std::os::unix::fs::symlink;
    use std::path::Path;

    use super::{Gate, Gatekeeper, local_path, plain_name};
    use crate::Error;

    fn refused(keeper: &Gatekeeper, image: &Path, name: &str) -> bool {
        matches!(keeper.admit(image, name), Err(Error::Refused { .. }))
    }

    #[test]
    fn plain_name_escapes_colons() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path().canonicalize().unwrap();
        for name in ["top", "web1-10:00", "file:top"] {
            File::create(root.join(name)).unwrap();
            let keeper = Gatekeeper::new(&Gate::SameFolder, &[], &root.join("top")).unwrap();
            let found = keeper.admit(&root.join("top"), &plain_name(name)).unwrap();
            assert_eq!(found, root.join(name));
        }
        assert_eq!((&*plain_name("a/b:c"), &*plain_name("/a:b")), ("a/b:c", "/a:b"));
    }

    #[test]
    fn gate_uses_canonical_paths() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path().canonicalize().unwrap();
        create_dir(root.join("vm")).unwrap();
        create_dir(root.join("vm/below")).unwrap();
        for name in ["vm/top", "vm/base", "vm/below/deep", "secret"] {
            File::create(root.join(name)).unwrap();
        }
        symlink("../secret", root.join("vm/innocent")).unwrap();
        let top = root.join("vm/top");
        let secret = root.join("secret").display().to_string();

        let same_folder = Gatekeeper::new(&Gate::SameFolder, &[], &top).unwrap();
        assert_eq!(same_folder.admit(&top, "base").unwrap(), root.join("vm/base"));
        assert_eq!(same_folder.admit(&top, "file:base").unwrap(), root.join("vm/base"));
        assert_eq!(same_folder.admit(&top, "below/../base").unwrap(), root.join("vm/base"));
        for name in [
            "innocent",
            "../secret",
            "below/deep",
            &secret,
            "../no-such-file",
            "/etc/shadow",
        ] {
            assert!(refused(&same_folder, &top, name), "{name}");
        }
        assert!(matches!(same_folder.admit(&top, "gone"), Err(Error::Io { .. })));

        let within = Gatekeeper::new(&Gate::Within(root.join("vm")), &[], &top).unwrap();
        within.admit(&top, "below/deep").unwrap();
        assert!(refused(&within, &top, "innocent"));

        let deny = Gatekeeper::new(&Gate::Deny, &[root.join("vm/innocent")], &top).unwrap();
        assert!(refused(&deny, &top, "base"));
        assert_eq!(
            deny.admit(&top, "innocent").unwrap(),
            root.join("secret"),
            "named by the user"
        );
    }

    #[test]
    fn gate_admits_folder_of_link_and_of_file() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path().canonicalize().unwrap();
        create_dir(root.join("links")).unwrap();
        create_dir(root.join("pool")).unwrap();
        for name in ["links/base", "pool/base", "pool/top"] {
            File::create(root.join(name)).unwrap();
        }
        symlink("../pool/top", root.join("links/top")).unwrap();
        let keeper = Gatekeeper::new(&Gate::SameFolder, &[], &root.join("links/top")).unwrap();
        assert_eq!(
            keeper.admit(&root.join("links/top"), "base").unwrap(),
            root.join("links/base")
        );
        assert_eq!(
            keeper.admit(&root.join("links/top"), "../pool/base").unwrap(),
            root.join("pool/base")
        );
    }

    #[test]
    fn only_local_files_have_paths() {
        for name in [
            "json:{\"driver\":\"file\"}",
            "nbd://host/x",
            "http://x/y",
            "ssh:host",
            "fat:/etc",
            "",
        ] {
            assert!(local_path(name).is_err(), "{name}");
        }
        assert_eq!(local_path("file:/a/b").unwrap(), Path::new("/a/b"));
        assert_eq!(local_path("file:///a/b").unwrap(), Path::new("/a/b"));
        assert_eq!(local_path("dir/with:colon").unwrap(), Path::new("dir/with:colon"));
    }
}
