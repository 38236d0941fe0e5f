//! What every kind of archive is read as.

use crate::Result;

/// An archive that is being read.
///
/// Opening one has read all that stands before the first byte of a disk: the documents and the disks are known from then on.
pub trait ArchiveReader: Send {
    /// The texts that describe the machine, in the order of the archive.
    fn documents(&self) -> &[Document];

    /// The disks, in the order in which their data comes where the format has one.
    fn disks(&self) -> &[ArchiveDisk];

    /// What the archive holds that is neither, by its name there, and that is passed over: the memory of a running machine.
    fn left_out(&self) -> &[String] {
        &[]
    }

    /// Whether the size of a disk in [`disks`](Self::disks) is that of its image. Otherwise it is that of a document, which may be wrong,
    /// until the first piece of the disk comes.
    fn is_size_certain(&self, _disk: usize) -> bool {
        true
    }

    /// What the documents say and the disks are not, in words; known when the archive has come to its end.
    fn corrections(&self) -> Vec<String> {
        Vec::new()
    }

    /// What nothing in the archive vouches for, in words; known when it has come to its end.
    fn unverified(&self) -> Vec<String> {
        Vec::new()
    }

    /// The next piece, or none at the end of the archive, which has then been checked to its last byte.
    ///
    /// Pieces of one disk never overlap. What no piece covers is zero, once the end of the disk was told.
    fn next(&mut self) -> Result<Option<Piece<'_>>>;

    /// Whether all pieces of one disk come before those of the next, at rising offsets. [`Ordered`](crate::Ordered) makes it so.
    fn is_in_order(&self) -> bool;
}

/// A text that describes the machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Document {
    /// What it is called in the archive.
    pub name: String,
    /// What kind of text it is.
    pub kind: DocumentKind,
    /// Its bytes, as they stand there; at most a few MiB.
    pub content: Vec<u8>,
}

/// What kind of text a document is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DocumentKind {
    /// `ova.xml` of an XVA: records of XenServer as XML-RPC values.
    XenRecords,
    /// A descriptor in the Open Virtualization Format.
    Ovf,
    /// A machine's configuration as Proxmox keeps it: `qemu-server.conf`.
    Proxmox,
    /// Something else, which is kept as it is.
    Other,
}

/// A disk in an archive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ArchiveDisk {
    /// What the archive calls it, by which the documents refer to it: `Ref:7`, `disk1.vmdk`, `drive-scsi0`.
    pub key: String,
    /// Size of the disk.
    pub size_bytes: u64,
    /// Where its content is.
    pub content: DiskContent,
}

/// Where the content of a disk is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DiskContent {
    /// In the archive.
    Stored,
    /// Nowhere: the documents describe a disk of zeroes.
    Blank,
}

/// A part of a disk's content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Piece<'a> {
    /// Bytes of a disk.
    Data {
        /// Which disk, by its place in [`ArchiveReader::disks`].
        disk: usize,
        /// Where they belong in it.
        offset: u64,
        /// The bytes.
        bytes: &'a [u8],
    },
    /// All of a disk has come.
    End {
        /// Which disk.
        disk: usize,
    },
}
