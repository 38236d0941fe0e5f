//! Names of files of guests: `SNAPSHOT[:DISK][:VOLUME][:/PATH]`.
//!
//! The path begins at the first `:/`. What is before it is the name of a snapshot, optionally with a disk; if it cannot be
//! read as that, the text after its last colon is the volume. A disk that does not exist is taken for a volume.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;

use crate::{NameError, SnapshotName};

/// A file of a guest as named by a user.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GuestAddress {
    /// The snapshot, and the disk if one is named.
    pub name: SnapshotName,
    /// The volume: the number of a partition, `GROUP/VOLUME` or `whole`.
    pub volume: Option<String>,
    /// The path, which begins with `/`; empty if none is named.
    pub path: Vec<u8>,
}

/// Why a text names no file of a guest.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GuestAddressError {
    /// The part before the path is not UTF-8.
    #[error("the name of the snapshot is not valid UTF-8")]
    NotText,
    /// The part before the path names no snapshot.
    #[error(transparent)]
    Name(#[from] NameError),
}

impl GuestAddress {
    /// Parses a text from the command line. Paths may have any bytes.
    pub fn parse(text: &OsStr) -> Result<Self, GuestAddressError> {
        let bytes = text.as_bytes();
        let at = bytes.windows(2).position(|pair| pair == b":/");
        let (head, path) = match at {
            Some(at) => (&bytes[..at], bytes[at + 1..].to_vec()),
            None => (bytes, Vec::new()),
        };
        let head = std::str::from_utf8(head).map_err(|_| GuestAddressError::NotText)?;
        let whole = head.parse::<SnapshotName>();
        let (name, volume) = match (whole, head.rsplit_once(':')) {
            (Ok(name), _) => (name, None),
            (Err(error), None) => return Err(error.into()),
            (Err(error), Some((head, volume))) => match head.parse() {
                Ok(name) if !volume.is_empty() => (name, Some(volume.to_owned())),
                _ => return Err(error.into()),
            },
        };
        Ok(Self { name, volume, path })
    }

    /// Whether the whole snapshot, disk or volume is meant, without a path in it.
    pub fn has_no_path(&self) -> bool {
        self.path.iter().all(|byte| *byte == b'/')
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;

    use super::GuestAddress;

    fn parts(text: &str) -> Option<(Option<String>, Option<String>, String)> {
        let address = GuestAddress::parse(OsStr::new(text)).ok()?;
        let disk = address.name.disk.map(|disk| disk.as_str().to_owned());
        Some((disk, address.volume, String::from_utf8(address.path).unwrap()))
    }

    #[test]
    fn disks_volumes_and_paths_are_told_apart() {
        let some = |text: &str| Some(text.to_owned());
        for (text, disk, volume, path) in [
            ("web1", None, None, ""),
            ("web1:/etc", None, None, "/etc"),
            ("web1:/a:/b", None, None, "/a:/b"),
            ("web1:vda:/", some("vda"), None, "/"),
            ("web1:vda:1:/etc", some("vda"), some("1"), "/etc"),
            ("web1:vg/root:/etc", None, some("vg/root"), "/etc"),
            ("web1:vda:vg/root", some("vda"), some("vg/root"), ""),
            ("web1@2026-11-20T10:00:vda:1:/etc", some("vda"), some("1"), "/etc"),
            ("web1@2026-11-20T10:00:/etc", None, None, "/etc"),
        ] {
            assert_eq!(parts(text), Some((disk, volume, path.to_owned())), "{text}");
        }
        for text in ["", ":/etc", "web1:a:b:c:/x", "web1:vda::/x"] {
            assert_eq!(parts(text), None, "{text}");
        }
    }
}
