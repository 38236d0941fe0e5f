//! Errors of reading and writing archives.

/// Result of an operation on an archive.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of an archive.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Reading the stream failed.
    #[error("read the archive at offset {offset}")]
    Read {
        /// The offset in bytes from its start.
        offset: u64,
        /// The operating system's reason.
        source: std::io::Error,
    },
    /// Writing the stream failed.
    #[error("write the archive at offset {offset}")]
    Write {
        /// The offset in bytes from its start.
        offset: u64,
        /// The operating system's reason.
        source: std::io::Error,
    },
    /// Disks that are stored out of order could not be written to temporary files.
    #[error("keep the disks of the archive in a temporary file in {}", folder.display())]
    Spool {
        /// The folder of the files.
        folder: std::path::PathBuf,
        /// The operating system's reason: often a full file system.
        source: std::io::Error,
    },
    /// The archive is inconsistent, or violates its format.
    #[error("the archive is damaged: {what} at offset {offset}: {detail}")]
    Corrupt {
        /// The structure: "member header", "checksum"...
        what: &'static str,
        /// The offset in bytes from the start of the decompressed archive.
        offset: u64,
        /// The expected and the actual value.
        detail: String,
    },
    /// The archive is truncated.
    #[error("the archive ends at offset {offset}, in the middle of {what}: it was cut off")]
    CutOff {
        /// The structure that was being read.
        what: &'static str,
        /// The length of what exists, in bytes.
        offset: u64,
    },
    /// The archive uses an unsupported feature.
    #[error("the archive uses {feature}, which is not supported: {detail}")]
    Unsupported {
        /// The feature.
        feature: String,
        /// The reason, and an alternative.
        detail: String,
    },
    /// A packed file has no index at its end.
    #[error("the file has no index: it was not packed by holdfast compress, or it was cut off")]
    NoIndex,
    /// The stream is not a known kind of archive.
    #[error("this is not a known machine archive: {detail}")]
    Unknown {
        /// How it begins.
        detail: String,
    },
    /// An option has an invalid value.
    #[error("{option}: {detail}")]
    InvalidOption {
        /// The option.
        option: &'static str,
        /// The reason.
        detail: String,
    },
    /// The machine's configuration in the archive cannot be read.
    #[error(transparent)]
    Hardware(#[from] holdfast_hardware::Error),
    /// Reading a disk for an archive failed.
    #[error(transparent)]
    Device(#[from] holdfast_block::Error),
    /// An image in the archive, stored in an unnamed temporary file, cannot be read.
    #[error("the image {name} in the archive")]
    StoredImage {
        /// Its name in the archive.
        name: String,
        /// The error of the image.
        source: holdfast_image::Error,
    },
    /// An image in the archive cannot be read.
    #[error(transparent)]
    Image(#[from] holdfast_image::Error),
}
