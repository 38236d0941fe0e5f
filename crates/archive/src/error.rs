//! What can go wrong with an archive.

/// Result of an operation on an archive.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of an archive.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Reading the stream failed.
    #[error("read the archive at offset {offset}")]
    Read {
        /// Where, in bytes from its start.
        offset: u64,
        /// The operating system's reason.
        source: std::io::Error,
    },
    /// Writing the stream failed.
    #[error("write the archive at offset {offset}")]
    Write {
        /// Where, in bytes from its start.
        offset: u64,
        /// The operating system's reason.
        source: std::io::Error,
    },
    /// Disks could not be kept in files until it is their turn.
    #[error("keep the disks of the archive in a temporary file in {}", folder.display())]
    Spool {
        /// Where the files are.
        folder: std::path::PathBuf,
        /// The operating system's reason: often, that the file system is full.
        source: std::io::Error,
    },
    /// The archive contradicts itself or its format.
    #[error("the archive is damaged: {what} at offset {offset}: {detail}")]
    Corrupt {
        /// The structure: "member header", "checksum"...
        what: &'static str,
        /// Where, in bytes from the start of the archive, once decompressed.
        offset: u64,
        /// Expected and actual, for a person.
        detail: String,
    },
    /// The archive ends before its end.
    #[error("the archive ends at offset {offset}, in the middle of {what}: it was cut off")]
    CutOff {
        /// What was being read.
        what: &'static str,
        /// Where it ends, in bytes.
        offset: u64,
    },
    /// The archive uses something that this program does not do.
    #[error("the archive uses {feature}, which is not supported: {detail}")]
    Unsupported {
        /// What it uses.
        feature: String,
        /// Why, and what to do instead.
        detail: String,
    },
    /// A packed file has no index behind it.
    #[error("the file has no index: it was not packed by holdfast compress, or it was cut off")]
    NoIndex,
    /// The stream is none of the archives that are known.
    #[error("this is no machine archive that is known: {detail}")]
    Unknown {
        /// What it begins with.
        detail: String,
    },
    /// An option has a value that makes no sense.
    #[error("{option}: {detail}")]
    InvalidOption {
        /// Which.
        option: &'static str,
        /// Why not.
        detail: String,
    },
    /// What an archive says of its machine is not understood.
    #[error(transparent)]
    Hardware(#[from] holdfast_hardware::Error),
    /// A disk could not be read to be written into an archive.
    #[error(transparent)]
    Device(#[from] holdfast_block::Error),
    /// A disk of the archive is an image that cannot be read, which waits in a file without a name.
    #[error("the image {name} in the archive")]
    StoredImage {
        /// What it is called in the archive.
        name: String,
        /// What is wrong with it.
        source: holdfast_image::Error,
    },
    /// A disk of the archive is an image that cannot be read.
    #[error(transparent)]
    Image(#[from] holdfast_image::Error),
}
