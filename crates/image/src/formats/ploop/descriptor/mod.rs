//! The descriptor of a Parallels or ploop disk: its files, and their parents.
//!
//! A disk is a folder, such as `web1.hdd`, with a text `DiskDescriptor.xml` and the files that it lists. A file is a
//! *delta*: an expanding image (`Compressed`, as in [`ploop`](crate::formats::ploop)), or, for the root only, a raw
//! image (`Plain`). Each has a GUID, which is also the name of a snapshot, except for the top, which the machine
//! writes to. Only the descriptor has the GUID and the parent of a delta: the header of the file has neither.
//!
//! Specification: QEMU's `docs/interop/prl-xml.rst`; for anything that it leaves open, `lib/xml.c` of OpenVZ's
//! ploop.
//!
//! ```xml
//! <Parallels_disk_image Version="1.0">
//!     <Disk_Parameters>       <!-- Disk_size in sectors; the product of Cylinders, Heads and Sectors is the same; Padding is 0 -->
//!     <StorageData>
//!         <Storage>           <!-- Start, End and Blocksize in sectors; more than one Storage is a disk that was split -->
//!             <Image>         <!-- GUID, Type, File: relative to the folder, or absolute -->
//!     <Snapshots>             <!-- TopGUID; if it is missing, the top has the usual GUID -->
//!         <Shot>              <!-- GUID of an image, ParentGUID: zeroes for the root -->
//! ```
//!
//! Other programs store undocumented elements in it. Therefore the text itself is kept: a change replaces only what it
//! has to, and the rest stays byte for byte.

mod edit;
mod file;
mod identity;
mod layers;
mod parse;

#[cfg(test)]
mod tests;

use std::ops::Range;

use super::SECTOR_BYTES;
use crate::model::info::Delta;
use crate::{ImageId, Result};

pub(crate) use file::load_from;

/// File name of the descriptor in its folder.
pub const FILE_NAME: &str = "DiskDescriptor.xml";
/// Four times the size of a descriptor with a thousand deltas.
pub(crate) const TEXT_BYTES_MAX: u64 = 1 << 20;
/// Limit of the deltas of a disk, with all branches. ploop creates at most 128.
const DELTA_COUNT_MAX: usize = 1024;
/// Limit of the length of a chain, as in ploop.
pub(crate) const CHAIN_LENGTH_MAX: usize = 128;

/// The descriptor of a Parallels or ploop disk, `DiskDescriptor.xml`.
///
/// It was validated: there is one root, it is the ancestor of every other delta, and the top is one of the deltas.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiskDescriptor {
    text: String,
    disk_bytes: u64,
    id: Option<ImageId>,
    top: ImageId,
    deltas: Vec<Delta>,
    /// Ranges of the text that contain identities.
    ids: Vec<(ImageId, Range<usize>)>,
}

impl DiskDescriptor {
    /// The GUID of the top if the descriptor does not state it; ploop and Parallels use it for every top.
    pub const TOP: ImageId = ImageId([
        0x5f, 0xba, 0xab, 0xe3, 0x69, 0x58, 0x40, 0xff, 0x92, 0xa7, 0x86, 0x0e, 0x32, 0x9a, 0xab, 0x41,
    ]);
    /// The GUID that backup programs use for their own delta; it is never the top.
    pub const BACKUP: ImageId = ImageId([
        0x70, 0x47, 0x18, 0xe1, 0x23, 0x14, 0x44, 0xc8, 0x90, 0x87, 0xd7, 0x8e, 0xd3, 0x6b, 0x0f, 0x4e,
    ]);

    /// Parses a descriptor; errors call it `name`.
    ///
    /// # Errors
    /// It is invalid, or the disk is not supported: split, encrypted, padded, or based on another one.
    pub fn parse(text: &[u8], name: &str) -> Result<Self> {
        parse::parse(text, name)
    }

    /// The descriptor of a new disk of `disk_bytes`, a multiple of 512, with the identity `id`. Its only delta is the
    /// expanding image `file` with clusters of `cluster_bytes`.
    pub(crate) fn of_new(disk_bytes: u64, cluster_bytes: u64, file: &str, id: ImageId) -> Result<Self> {
        let sectors = disk_bytes / SECTOR_BYTES;
        let (heads, track) = (
            common_power(sectors, 16 * 32) / common_power(sectors, 32),
            common_power(sectors, 32),
        );
        let (top, root) = (Self::TOP, ImageId::NIL);
        let text = format!(
            "<?xml version='1.0' encoding='UTF-8'?>
<Parallels_disk_image Version=\"1.0\">
    <Disk_Parameters>
        <Disk_size>{sectors}</Disk_size>
        <Cylinders>{}</Cylinders>
        <Heads>{heads}</Heads>
        <Sectors>{track}</Sectors>
        <Padding>0</Padding>
        <UID>{{{id}}}</UID>
    </Disk_Parameters>
    <StorageData>
        <Storage>
            <Start>0</Start>
            <End>{sectors}</End>
            <Blocksize>{}</Blocksize>
            <Image>
                <GUID>{{{top}}}</GUID>
                <Type>Compressed</Type>
                <File>{file}</File>
            </Image>
        </Storage>
    </StorageData>
    <Snapshots>
        <TopGUID>{{{top}}}</TopGUID>
        <Shot>
            <GUID>{{{top}}}</GUID>
            <ParentGUID>{{{root}}}</ParentGUID>
        </Shot>
    </Snapshots>
</Parallels_disk_image>
",
            sectors / (heads * track),
            cluster_bytes / SECTOR_BYTES,
        );
        Self::parse(text.as_bytes(), FILE_NAME)
    }

    /// The current text.
    pub fn as_text(&self) -> &str {
        &self.text
    }

    /// Size of the disk according to the descriptor.
    pub fn disk_bytes(&self) -> u64 {
        self.disk_bytes
    }

    /// The identity of the disk; ploop stores none.
    pub fn id(&self) -> Option<ImageId> {
        self.id
    }

    /// The delta that the machine writes to.
    pub fn top(&self) -> ImageId {
        self.top
    }

    /// All deltas of all branches, in the order of the text.
    pub fn deltas(&self) -> &[Delta] {
        &self.deltas
    }

    /// The delta with this id.
    pub fn delta(&self, id: ImageId) -> Option<&Delta> {
        self.deltas.iter().find(|delta| delta.id == id)
    }

    /// The delta `id` and its ancestors, up to the root; empty if it does not exist.
    pub fn chain_of(&self, id: ImageId) -> Vec<&Delta> {
        let below = |delta: &&Delta| delta.parent.and_then(|parent| self.delta(parent));
        std::iter::successors(self.delta(id), below).collect()
    }

    /// Whether `id` is the parent of a delta: then it must not be written to.
    pub fn has_children(&self, id: ImageId) -> bool {
        self.deltas.iter().any(|delta| delta.parent == Some(id))
    }
}

/// The greatest power of two that divides both; `bound` is a power of two.
fn common_power(value: u64, bound: u64) -> u64 {
    1 << value.trailing_zeros().min(bound.trailing_zeros())
}

/// Whether a file that begins with `head` is a descriptor. XML may have other content before the first element.
pub(crate) fn is_descriptor(head: &[u8]) -> bool {
    let mut rest = head.strip_prefix(b"\xef\xbb\xbf").unwrap_or(head);
    loop {
        rest = rest.trim_ascii_start();
        let end: &[u8] = match rest {
            [b'<', b'?', ..] => b"?>",
            [b'<', b'!', b'-', b'-', ..] => b"-->",
            _ => break,
        };
        let at = rest.windows(end.len()).position(|found| found == end);
        let Some(after) = at.and_then(|at| rest.get(at + end.len()..)) else {
            return false;
        };
        rest = after;
    }
    let name = rest.strip_prefix(b"<Parallels_disk_image");
    name.is_some_and(|after| matches!(after, [b'>' | b'/', ..]) || after.first().is_some_and(u8::is_ascii_whitespace))
}
