//! Errors of images.

use std::path::PathBuf;

/// Result of an operation on an image.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of an image file.
///
/// Every variant that concerns one image names it, since a chain has many files and the one at fault is rarely the one
/// on the command line.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The operating system failed to open, create or lock a file.
    #[error("{action} {}", path.display())]
    Io {
        /// The attempted action: "open", "create", "lock"...
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The operating system's reason.
        source: std::io::Error,
    },
    /// The backing file or parent of an image cannot be opened.
    #[error("{action} {}, on which {image} is based", path.display())]
    Backing {
        /// The image.
        image: String,
        /// The attempted action: "open"...
        action: &'static str,
        /// The file that it is based on.
        path: PathBuf,
        /// The operating system's reason.
        source: std::io::Error,
    },
    /// Reading or writing an open file or device failed.
    #[error(transparent)]
    Device(#[from] holdfast_block::Error),
    /// The format is recognized, but not supported.
    #[error("{image} is a {format} image, which is not supported: {detail}")]
    UnsupportedFormat {
        /// The file.
        image: String,
        /// Name of the format.
        format: &'static str,
        /// The solution.
        detail: &'static str,
    },
    /// The image uses a feature that is unknown or not supported.
    #[error("{image} uses {feature}, which is not supported: {detail}")]
    UnsupportedFeature {
        /// The image.
        image: String,
        /// Name of the feature, from the image's own table if it has one.
        feature: String,
        /// The reason and the solution.
        detail: String,
    },
    /// The metadata of the image is invalid.
    #[error("{image} is damaged: {what} at offset {offset}: {detail}")]
    Corrupt {
        /// The image.
        image: String,
        /// The structure: "header", "l2 table"...
        what: &'static str,
        /// Offset of the structure in the file, in bytes.
        offset: u64,
        /// Expected and actual value, as text.
        detail: String,
    },
    /// The file is truncated: it ends before the last cluster, block or grain that its tables refer to.
    #[error("{image} was cut off: the file ends before the end of the data that its tables refer to")]
    CutOff {
        /// The file.
        image: String,
    },
    /// The image is read from a stream, and its layout requires seeking backwards.
    #[error("{image} cannot be read as a stream: {detail}; store it in a file first")]
    NotInOrder {
        /// The stream.
        image: String,
        /// What is out of order.
        detail: String,
    },
    /// The gate refused a file that an image names.
    #[error("{image} refers to the file {file}, which may not be opened: {detail}")]
    Refused {
        /// The image that names the file.
        image: String,
        /// The name as the image stores it.
        file: String,
        /// The reason and the solution.
        detail: String,
    },
    /// An image refers to another file, and its format was only detected from its content, which the guest of a raw disk controls.
    #[error(
        "{image} looks like a {format} image that refers to the file {file}, but its format is detected from its content only, which the guest of a raw disk can write"
    )]
    GuessedFormat {
        /// The image.
        image: String,
        /// The detected format.
        format: &'static str,
        /// The name as the image stores it.
        file: String,
    },
    /// The extension of a file contradicts its content.
    #[error("{image} has the name of a {called} image, but its content is {format}")]
    NameContradicts {
        /// The file.
        image: String,
        /// The format of its extension.
        called: &'static str,
        /// The format of its content.
        format: &'static str,
    },
    /// The extension of a new file belongs to no known format.
    #[error("{} has an extension that belongs to no known format", path.display())]
    UnknownExtension {
        /// The file.
        path: PathBuf,
    },
    /// The requested format is not that of the image.
    #[error("{image} is not a {said} image: its content is {found}")]
    OtherFormat {
        /// The image.
        image: String,
        /// The requested format.
        said: &'static str,
        /// The format of its content.
        found: &'static str,
    },
    /// A chain of backing files contains a loop.
    #[error("{image} is its own backing file, through {through}")]
    ChainLoop {
        /// The file that occurs twice.
        image: String,
        /// The image that refers to it for the second time.
        through: String,
    },
    /// A chain of backing files has too many layers.
    #[error("the chain of backing files below {image} is longer than {layer_count_max} layers")]
    ChainTooLong {
        /// The top image.
        image: String,
        /// The limit.
        layer_count_max: usize,
    },
    /// The parent of an image is not among the files that may be opened.
    #[error(
        "the parent of {image}, {parent}, is not among the files that may be opened; if you trust the image, allow it by name"
    )]
    ParentNotFound {
        /// The image.
        image: String,
        /// The name or identity of the parent, as the image stores it.
        parent: String,
    },
    /// The parent of an image was modified after the image was created.
    #[error("{parent} was modified after its child {image} was created")]
    ParentChanged {
        /// The image.
        image: String,
        /// The parent.
        parent: String,
    },
    /// The image has no identity, or another file has it.
    #[error("{image} has no identity of its own: {detail}")]
    NoIdentity {
        /// The image.
        image: String,
        /// The reason, and a file that may have one.
        detail: &'static str,
    },
    /// An operation on an image would break its children, which were not named.
    #[error("{image} is the parent of {}, which depend on it", children.join(", "))]
    HasChildren {
        /// The image.
        image: String,
        /// The children.
        children: Vec<String>,
    },
    /// An image was named as the child of another one, but is not.
    #[error("{image} is not a child of {parent}: {detail}")]
    NotAChild {
        /// The image.
        image: String,
        /// The expected parent.
        parent: String,
        /// Its actual parent.
        detail: String,
    },
    /// The image has no snapshot or bitmap of that name.
    #[error("{image} has no {what} {name}")]
    NotFound {
        /// The image.
        image: String,
        /// "snapshot" or "bitmap".
        what: &'static str,
        /// The requested name or id.
        name: String,
    },
    /// The image may be read but must not be written.
    #[error("{image} cannot be written: {detail}")]
    NotWritable {
        /// The image.
        image: String,
        /// The reason and the solution.
        detail: String,
    },
    /// The size of the image cannot be changed.
    #[error("{image} cannot be resized: {detail}")]
    NotResizable {
        /// The image.
        image: String,
        /// The reason and the solution.
        detail: String,
    },
    /// The new size is smaller, and shrinking was not allowed.
    #[error("{image} has {before_bytes} bytes; shrinking it to {after_bytes} bytes loses the data at its end")]
    WouldShrink {
        /// The image.
        image: String,
        /// Its size in bytes.
        before_bytes: u64,
        /// The requested size in bytes.
        after_bytes: u64,
    },
    /// The image is open for writing elsewhere.
    #[error("{image} is in use by another process")]
    Locked {
        /// The image.
        image: String,
    },
    /// An option of a new image is invalid, alone or together with others.
    #[error("{option}: {detail}")]
    InvalidOption {
        /// Name of the option.
        option: &'static str,
        /// The reason.
        detail: String,
    },
}

impl From<Error> for holdfast_block::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Device(inner) => inner,
            other => Self::layer(other),
        }
    }
}

pub(crate) fn corrupt(image: &str, what: &'static str, offset: u64, detail: impl Into<String>) -> Error {
    Error::Corrupt {
        image: image.to_owned(),
        what,
        offset,
        detail: detail.into(),
    }
}

impl Error {
    pub(crate) fn io(action: &'static str, path: &std::path::Path, source: impl Into<std::io::Error>) -> Self {
        Self::Io {
            action,
            path: path.to_owned(),
            source: source.into(),
        }
    }

    /// Names the file of an error of the system: devices do not know their path.
    pub(crate) fn in_file(self, action: &'static str, path: &std::path::Path) -> Self {
        match self {
            Self::Device(holdfast_block::Error::Io { source, .. }) => Self::io(action, path, source),
            other => other,
        }
    }

    /// Whether the error means damaged data, rather than a missing, inaccessible or unsupported file.
    pub fn is_corrupt(&self) -> bool {
        match self {
            Self::Corrupt { .. }
            | Self::CutOff { .. }
            | Self::ChainLoop { .. }
            | Self::Device(holdfast_block::Error::Corrupt { .. }) => true,
            Self::Device(holdfast_block::Error::Layer(inner)) => {
                inner.downcast_ref::<Self>().is_some_and(Self::is_corrupt)
            }
            _ => false,
        }
    }
}
