//! What can go wrong with a device.

/// Result of a device operation.
pub type Result<T> = std::result::Result<T, Error>;

/// An error of a block device.
///
/// Layers pass the errors of the devices below them on unchanged; formats above (images, the repository) put their own
/// error into [`Error::Layer`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The request reaches past the end of the device; nothing was read or written.
    #[error("{length} bytes at offset {offset} reach past the end of the device ({size_bytes} bytes)")]
    OutOfBounds {
        /// First byte of the request.
        offset: u64,
        /// Bytes asked for.
        length: u64,
        /// Size of the device.
        size_bytes: u64,
    },
    /// The operating system refused.
    #[error("{action} at offset {offset}")]
    Io {
        /// What was tried: "read", "write", "flush"...
        action: &'static str,
        /// First byte of the request.
        offset: u64,
        /// The operating system's reason.
        source: std::io::Error,
    },
    /// Stored bytes are not what was written, or make no sense.
    #[error("{what} at offset {offset} is damaged: {detail}")]
    Corrupt {
        /// What is damaged: "overlay header", "bitmap"...
        what: &'static str,
        /// Where, in bytes from the start of the file or device that holds it.
        offset: u64,
        /// Expected and actual, for a person.
        detail: String,
    },
    /// The device, or the medium below it, cannot do this.
    #[error("{what} is not supported: {detail}")]
    Unsupported {
        /// The operation or feature.
        what: &'static str,
        /// Why, and what to do instead.
        detail: String,
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

    /// An [`Error::Io`] from the operating system's answer to `action` at `offset`.
    pub fn io(action: &'static str, offset: u64, source: impl Into<std::io::Error>) -> Self {
        Self::Io {
            action,
            offset,
            source: source.into(),
        }
    }

    /// Whether the medium is full.
    pub fn is_no_space(&self) -> bool {
        matches!(self, Self::Io { source, .. }
            if matches!(source.kind(), std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded))
    }
}
