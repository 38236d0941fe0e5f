//! Errors of devices.

/// Result of a device operation.
pub type Result<T> = std::result::Result<T, Error>;

/// An error of a block device.
///
/// Layers return the errors of lower devices unchanged. Formats (images, the repository) wrap their own errors in
/// [`Error::Layer`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The request reaches past the end of the device; nothing was read or written.
    #[error("{length} bytes at offset {offset} reach past the end of the device ({size_bytes} bytes)")]
    OutOfBounds {
        /// First byte of the request.
        offset: u64,
        /// Length of the request in bytes.
        length: u64,
        /// Size of the device.
        size_bytes: u64,
    },
    /// A file or device could not be opened or created.
    #[error("{action} {}", path.display())]
    Path {
        /// What failed: "open", "create"...
        action: &'static str,
        /// The file.
        path: std::path::PathBuf,
        /// The operating system's reason.
        source: std::io::Error,
    },
    /// The file shrank after it was opened, so some of its bytes are missing.
    #[error(
        "the file shrank while it was in use: {actual_size_bytes} bytes of {size_bytes} are left, \
         nothing can be read at offset {offset}"
    )]
    Shrunk {
        /// First byte that could not be read.
        offset: u64,
        /// Size when the file was opened.
        size_bytes: u64,
        /// Size now.
        actual_size_bytes: u64,
    },
    /// The operating system reported an error.
    #[error("{action} at offset {offset}")]
    Io {
        /// What failed: "read", "write", "flush"...
        action: &'static str,
        /// First byte of the request.
        offset: u64,
        /// The operating system's reason.
        source: std::io::Error,
    },
    /// Stored bytes are invalid, or differ from those that were written.
    #[error("{what} at offset {offset} is damaged: {detail}")]
    Corrupt {
        /// What is damaged: "overlay header", "bitmap"...
        what: &'static str,
        /// The position in bytes from the start of the file or device with the damage.
        offset: u64,
        /// Expected and actual value.
        detail: String,
    },
    /// The device, or its storage medium, does not support this.
    #[error("{what} is not supported: {detail}")]
    Unsupported {
        /// The operation or feature.
        what: &'static str,
        /// The reason, and what to do instead.
        detail: String,
    },
    /// The backing device is not the one that the overlay was created for.
    #[error("the overlay belongs to another backing device: it was made for {expected}, this is {actual}")]
    WrongBacking {
        /// Identity and size that the overlay records.
        expected: String,
        /// Identity and size of the given device.
        actual: String,
    },
    /// An error of the format or service that implements this device.
    #[error(transparent)]
    Layer(Box<dyn std::error::Error + Send + Sync>),
}

impl Error {
    /// Wraps the error of a format or service that implements a device.
    pub fn layer(source: impl std::error::Error + Send + Sync + 'static) -> Self {
        Self::Layer(Box::new(source))
    }

    /// An [`Error::Io`] from the operating system's error at `action` and `offset`.
    pub fn io(action: &'static str, offset: u64, source: impl Into<std::io::Error>) -> Self {
        Self::Io {
            action,
            offset,
            source: source.into(),
        }
    }

    /// Whether the storage medium is full.
    pub fn is_no_space(&self) -> bool {
        matches!(self, Self::Io { source, .. } | Self::Path { source, .. }
            if matches!(source.kind(), std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded))
    }
}
