//! What can go wrong with an image.

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
    /// The operating system refused to open, create or lock a file.
    #[error("{action} {}", path.display())]
    Io {
        /// What was tried: "open", "create", "lock"...
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The operating system's reason.
        source: std::io::Error,
    },
    /// The file that an image is based on cannot be had.
    #[error("{image} is based on {}, which cannot be had: {action}", path.display())]
    Backing {
        /// The image.
        image: String,
        /// What was tried: "open"...
        action: &'static str,
        /// The file that it is based on.
        path: PathBuf,
        /// The operating system's reason.
        source: std::io::Error,
    },
    /// Reading or writing an open file or device failed.
    #[error(transparent)]
    Device(#[from] holdfast_block::Error),
    /// The content belongs to a format that is known by name only.
    #[error("{image} is a {format} image, which cannot be opened here: {detail}")]
    UnsupportedFormat {
        /// The file.
        image: String,
        /// Name of the format.
        format: &'static str,
        /// What to do instead.
        detail: &'static str,
    },
    /// The image uses something that this program does not know or does not do.
    #[error("{image} uses {feature}, which is not supported: {detail}")]
    UnsupportedFeature {
        /// The image.
        image: String,
        /// Name of the feature, from the image's own table where it has one.
        feature: String,
        /// Why, and what to do instead.
        detail: String,
    },
    /// The image contradicts itself, its file or the format.
    #[error("{image} is damaged: {what} at offset {offset}: {detail}")]
    Corrupt {
        /// The image.
        image: String,
        /// The structure: "header", "l2 table"...
        what: &'static str,
        /// Where, in bytes from the start of the file.
        offset: u64,
        /// Expected and actual, for a person.
        detail: String,
    },
    /// The file of an image ends before the end of what its tables lead to.
    #[error("{image} was cut off: the file ends before the end of what its tables lead to")]
    CutOff {
        /// The file.
        image: String,
    },
    /// The image comes as a stream, and cannot be read without going back in it.
    #[error("{image} cannot be read as it comes: {detail}; put it into a file first")]
    NotInOrder {
        /// The stream.
        image: String,
        /// What is not where it would have to be.
        detail: String,
    },
    /// The gate refused a file that an image names.
    #[error("{image} names the file {file}, which it may not open: {detail}")]
    Refused {
        /// The image that names the file.
        image: String,
        /// The name as it stands in the image.
        file: String,
        /// Why, and what to do.
        detail: String,
    },
    /// Nobody has said the format of an image that names another file: its content alone says so, which for a raw disk its guest writes.
    #[error(
        "{image} looks like a {format} image that reads the file {file}, and nothing but its content says that it is one, which the guest of a raw disk can write"
    )]
    GuessedFormat {
        /// The image.
        image: String,
        /// What it looks like.
        format: &'static str,
        /// The name as it stands in the image.
        file: String,
    },
    /// The name of a file says another format than its content.
    #[error("{image} is called like a {called} image, and its content is {format}")]
    NameContradicts {
        /// The file.
        image: String,
        /// The format that its name says.
        called: &'static str,
        /// The format that its content shows.
        format: &'static str,
    },
    /// The name of a new file ends in something that no format is called by.
    #[error("{} ends in no format that is known", path.display())]
    UnknownExtension {
        /// The file.
        path: PathBuf,
    },
    /// An image was to be opened as one of a format that it is not.
    #[error("{image} is no {said} image: its content is {found}")]
    OtherFormat {
        /// The image.
        image: String,
        /// The format that it was opened as.
        said: &'static str,
        /// The format that its content shows.
        found: &'static str,
    },
    /// A chain of backing files that comes back to itself.
    #[error("{image} is its own backing file, through {through}")]
    ChainLoop {
        /// The file met twice.
        image: String,
        /// The image that names it for the second time.
        through: String,
    },
    /// A chain of backing files with more layers than the bound.
    #[error("the chain of backing files below {image} is longer than {layer_count_max} layers")]
    ChainTooLong {
        /// The top image.
        image: String,
        /// The bound.
        layer_count_max: usize,
    },
    /// An image differs from a parent that is not among the files that may be opened.
    #[error(
        "the parent of {image}, {parent}, is not among the files that may be opened; if you trust the image, allow it by name"
    )]
    ParentNotFound {
        /// The image.
        image: String,
        /// What it says of its parent.
        parent: String,
    },
    /// The parent of an image was written to after the image was made.
    #[error("{parent} is not what {image} differs from any more: it was written to since")]
    ParentChanged {
        /// The image.
        image: String,
        /// The parent.
        parent: String,
    },
    /// The format keeps no identity, or keeps it elsewhere.
    #[error("{image} has no identity of its own: {detail}")]
    NoIdentity {
        /// The image.
        image: String,
        /// Why, and where there may be one.
        detail: &'static str,
    },
    /// An image that other ones differ from, which were not named.
    #[error("{image} is the parent of {}, which would lose it", children.join(", "))]
    HasChildren {
        /// The image.
        image: String,
        /// The images that differ from it.
        children: Vec<String>,
    },
    /// An image that was named as the child of another one, and is not.
    #[error("{image} does not differ from {parent}: {detail}")]
    NotAChild {
        /// The image.
        image: String,
        /// The image that it was named as the child of.
        parent: String,
        /// What its parent is.
        detail: String,
    },
    /// The image has no snapshot or bitmap of that name.
    #[error("{image} has no {what} {name}")]
    NotFound {
        /// The image.
        image: String,
        /// "snapshot" or "bitmap".
        what: &'static str,
        /// The name or id asked for.
        name: String,
    },
    /// The image may be read but must not be written.
    #[error("{image} cannot be written: {detail}")]
    NotWritable {
        /// The image.
        image: String,
        /// Why, and what to do.
        detail: String,
    },
    /// The image cannot be given another size.
    #[error("{image} cannot be resized: {detail}")]
    NotResizable {
        /// The image.
        image: String,
        /// Why, and what to do instead.
        detail: String,
    },
    /// The image would lose its end, which was not allowed.
    #[error("{image} has {before_bytes} bytes, and what is past {after_bytes} would be lost")]
    WouldShrink {
        /// The image.
        image: String,
        /// Its size.
        before_bytes: u64,
        /// The size that it was to get.
        after_bytes: u64,
    },
    /// The image is open for writing elsewhere.
    #[error("{image} is in use by another process")]
    Locked {
        /// The image.
        image: String,
    },
    /// An option of a new image makes no sense, alone or with the others.
    #[error("{option}: {detail}")]
    InvalidOption {
        /// Name of the option.
        option: &'static str,
        /// Why.
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

/// An image that contradicts itself.
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

    /// Whether stored bytes make no sense (rather than: cannot be had, or must not be touched).
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
