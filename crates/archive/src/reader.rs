//! The interface that readers of all archives share.

use crate::Result;

/// Reads an archive.
///
/// Opening reads everything before the first byte of a disk, so documents and disks are known from then on.
pub trait ArchiveReader: Send {
    /// The texts that describe the machine, in the order of the archive.
    fn documents(&self) -> &[Document];

    /// The disks, in the order of their data if the format defines one.
    fn disks(&self) -> &[ArchiveDisk];

    /// Names of other content that is skipped, such as the memory of a running machine.
    fn left_out(&self) -> &[String] {
        &[]
    }

    /// Whether the size of a disk in [`disks`](Self::disks) is that of its image. Otherwise, until the first piece of the disk, it is that of a
    /// document, which may be wrong.
    fn is_size_certain(&self, _disk: usize) -> bool {
        true
    }

    /// Messages about documents that contradict the disks; complete at the end of the archive.
    fn corrections(&self) -> Vec<String> {
        Vec::new()
    }

    /// Messages about content without a checksum; complete at the end of the archive.
    fn unverified(&self) -> Vec<String> {
        Vec::new()
    }

    /// The next piece, or `None` at the end of the archive, which has then been checked to its last byte.
    ///
    /// Pieces of one disk never overlap. After the end of a disk, ranges without a piece are zero.
    fn next(&mut self) -> Result<Option<Piece<'_>>>;

    /// Whether all pieces of one disk precede those of the next, at ascending offsets. [`Ordered`](crate::Ordered)
    /// sorts pieces in this way.
    fn is_in_order(&self) -> bool;
}

/// A text that describes the machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Document {
    /// Its name in the archive.
    pub name: String,
    /// Its kind.
    pub kind: DocumentKind,
    /// Its bytes, unchanged; at most a few MiB.
    pub content: Vec<u8>,
}

/// The kind of a document.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DocumentKind {
    /// `ova.xml` of an XVA: records of XenServer as XML-RPC values.
    XenRecords,
    /// A descriptor in the Open Virtualization Format.
    Ovf,
    /// A machine's configuration as Proxmox keeps it: `qemu-server.conf`.
    Proxmox,
    /// Another text, which is kept unchanged.
    Other,
}

/// A disk in an archive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ArchiveDisk {
    /// Its name in the archive, by which the documents refer to it: `Ref:7`, `disk1.vmdk`, `drive-scsi0`.
    pub key: String,
    /// Size of the disk.
    pub size_bytes: u64,
    /// Whether the archive has its content.
    pub content: DiskContent,
}

/// Whether an archive has the content of a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DiskContent {
    /// In the archive.
    Stored,
    /// The documents describe a disk of zeroes.
    Blank,
}

/// A part of a disk's content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Piece<'a> {
    /// Bytes of a disk.
    Data {
        /// The disk's index in [`ArchiveReader::disks`].
        disk: usize,
        /// Their offset in the disk.
        offset: u64,
        /// The bytes.
        bytes: &'a [u8],
    },
    /// The end of a disk.
    End {
        /// The disk's index in [`ArchiveReader::disks`].
        disk: usize,
    },
}
