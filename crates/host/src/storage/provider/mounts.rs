//! The mounted file systems.
//!
//! Source: proc(5), `/proc/pid/mountinfo`.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt as _;
use std::path::{Path, PathBuf};

use super::{ProviderError, ProviderResult};

const MOUNTS: &str = "/proc/self/mountinfo";

/// The mounts in the namespace of this process, in order: a later mount hides an earlier one at the same mount point.
#[derive(Debug, Default)]
pub struct Mounts {
    mounts: Vec<Mount>,
}

/// A mount.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Mount {
    /// The mounted root inside the file system: `/`, or a subfolder for a bind mount or a subvolume.
    pub(super) root: PathBuf,
    /// The mount point.
    pub(super) point: PathBuf,
    /// The type: `zfs`, `btrfs`, `ext4`.
    pub(super) kind: String,
    /// The source: a device, or the name of a dataset.
    pub(super) source: String,
}

impl Mount {
    /// Whether it is a ZFS file system.
    pub(super) fn is_zfs(&self) -> bool {
        matches!(&self.kind[..], "zfs" | "fuse.zfs")
    }
}

impl Mounts {
    /// Reads the current mounts.
    pub fn read() -> ProviderResult<Self> {
        let text = std::fs::read(MOUNTS).map_err(|source| ProviderError::File {
            action: "read",
            path: MOUNTS.into(),
            source,
        })?;
        Ok(Self::parse(&text))
    }

    /// Skips invalid lines. The kernel writes none.
    fn parse(text: &[u8]) -> Self {
        let mounts = text.split(|byte| *byte == b'\n').filter_map(parse_line);
        Self {
            mounts: mounts.collect(),
        }
    }

    /// The mount of a file. The path must be absolute, without symbolic links.
    pub(super) fn of_path(&self, path: &Path) -> Option<&Mount> {
        let above = self.mounts.iter().filter(|mount| path.starts_with(&mount.point));
        above.max_by_key(|mount| mount.point.as_os_str().len())
    }

    /// Whether a file system of this type is mounted on the folder, and no other mount hides it. The path must be absolute,
    /// without symbolic links.
    pub fn is_mounted(&self, folder: &Path, kind: &str) -> bool {
        let last = self.mounts.iter().rev().find(|mount| mount.point == folder);
        last.is_some_and(|mount| mount.kind == kind)
    }

    /// The mount points of a type of file system.
    pub fn points_of_kind<'a>(&'a self, kind: &'a str) -> impl Iterator<Item = PathBuf> + 'a {
        self.of_kind(kind).map(|mount| mount.point.clone())
    }

    /// The source of the file system that is mounted on the folder.
    pub fn source_of(&self, folder: &Path) -> Option<&str> {
        let last = self.mounts.iter().rev().find(|mount| mount.point == folder);
        last.map(|mount| &mount.source[..])
    }

    /// The mount point of the file system of a file. The path must be absolute, without symbolic links.
    pub fn point_of(&self, path: &Path) -> Option<&Path> {
        self.of_path(path).map(|mount| &*mount.point)
    }

    /// The mount points of a source.
    pub fn points_of_source(&self, source: &str) -> Vec<PathBuf> {
        let is_of_source = |mount: &&Mount| mount.source == source;
        self.mounts
            .iter()
            .filter(is_of_source)
            .map(|mount| mount.point.clone())
            .collect()
    }

    /// The mount points of a block device.
    pub fn points_of_device(&self, device: &Path) -> Vec<PathBuf> {
        let is_of_device = |mount: &&Mount| Path::new(&mount.source) == device && mount.root == Path::new("/");
        self.mounts
            .iter()
            .filter(is_of_device)
            .map(|mount| mount.point.clone())
            .collect()
    }

    /// The mount point of a ZFS file system.
    pub(super) fn of_zfs(&self, dataset: &str) -> Option<&Path> {
        let is_wanted = |mount: &&Mount| mount.is_zfs() && mount.source == dataset && mount.root == Path::new("/");
        let mount = self.mounts.iter().find(is_wanted)?;
        // Another mount may hide the mount.
        (self.of_path(&mount.point) == Some(mount)).then_some(&mount.point)
    }

    /// The mounts of a type of file system.
    pub(super) fn of_kind<'a>(&'a self, kind: &'a str) -> impl Iterator<Item = &'a Mount> {
        self.mounts.iter().filter(move |mount| mount.kind == kind)
    }
}

/// `36 35 98:0 /root /mnt rw,noatime shared:1 - ext3 /dev/root rw`
fn parse_line(line: &[u8]) -> Option<Mount> {
    let mut fields = line.split(|byte| *byte == b' ');
    let mut before = fields.by_ref().take_while(|field| *field != b"-");
    let (root, point) = (before.nth(3)?, before.next()?);
    // The optional fields before the hyphen are not used.
    before.for_each(drop);
    let (kind, source) = (fields.next()?, fields.next()?);
    let text = |field| unescape(field).to_string_lossy().into_owned();
    Some(Mount {
        root: unescape(root).into(),
        point: unescape(point).into(),
        kind: text(kind),
        source: text(source),
    })
}

/// Spaces, tabs, line ends and backslashes are escaped as `\040`.
fn unescape(field: &[u8]) -> OsString {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((first, after)) = rest.split_first() {
        let number = (*first == b'\\').then(|| after.get(..3)).flatten();
        let number = number.and_then(|digits| u8::from_str_radix(std::str::from_utf8(digits).ok()?, 8).ok());
        if let Some(byte) = number {
            bytes.push(byte);
            rest = &after[3..];
        } else {
            bytes.push(*first);
            rest = after;
        }
    }
    OsString::from_vec(bytes)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::Mounts;

    const TEXT: &[u8] = b"21 1 0:20 / / rw,relatime shared:1 - ext4 /dev/vda1 rw\n\
        65 43 0:41 / /tank rw,relatime - zfs tank rw\n\
        66 65 0:42 / /tank/a\\040b rw,relatime shared:2 master:1 - fuse.zfs tank/a\\040b rw\n\
        67 21 0:50 /@vms /srv/vms rw - btrfs /dev/vdb rw,subvol=/@vms\n\
        68 21 0:42 /inside /bound rw - zfs tank/x rw\n\
        69 65 0:60 / /tank/a\\040b/c rw - tmpfs none rw\n\
        nonsense\n";

    #[test]
    fn a_file_is_on_the_deepest_mount() {
        let mounts = Mounts::parse(TEXT);
        let of = |path: &str| {
            mounts
                .of_path(Path::new(path))
                .map(|mount| mount.source.clone())
                .unwrap()
        };
        assert_eq!(of("/tank/a b/disk"), "tank/a b");
        assert_eq!(of("/tank/a bc"), "tank");
        assert_eq!(of("/tankard"), "/dev/vda1");
        assert_eq!(of("/tank/a b/c/d"), "none");
        assert_eq!(
            mounts.of_path(Path::new("/bound/x")).unwrap().root,
            Path::new("/inside")
        );
    }

    #[test]
    fn a_dataset_is_found_at_its_full_mount() {
        let mounts = Mounts::parse(TEXT);
        assert_eq!(mounts.of_zfs("tank/a b"), Some(Path::new("/tank/a b")));
        assert_eq!(mounts.of_zfs("tank/x"), None);
        assert_eq!(mounts.of_kind("btrfs").count(), 1);
        let hidden = [TEXT, b"70 21 0:70 / /tank rw - tmpfs none rw\n"].concat();
        assert_eq!(Mounts::parse(&hidden).of_zfs("tank"), None);
    }
}
