//! Errors of filling and packing the root folder of a container.

use std::path::PathBuf;

/// Why a root folder cannot be filled or packed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ContainerContentError {
    /// The folder to fill has files already.
    #[error("{} is not empty: it holds {entry}", root.display())]
    RootNotEmpty {
        /// The folder.
        root: PathBuf,
        /// A file in it.
        entry: String,
    },
    /// A file of the content cannot be written or read.
    #[error("{action} {entry}")]
    Entry {
        /// The operation.
        action: &'static str,
        /// The path in the container.
        entry: String,
        /// The operating system's reason.
        source: std::io::Error,
    },
    /// The content has a name that a root folder cannot have, or that would lead out of it.
    #[error("entry {entry:?} {reason}")]
    BadEntry {
        /// The name as stored.
        entry: String,
        /// What is wrong with it.
        reason: String,
    },
    /// An archive with files cannot be read.
    #[error("{origin}")]
    Archive {
        /// Its path, or the digest of a layer.
        origin: String,
        /// The reason.
        source: holdfast_archive::Error,
    },
    /// An archive with files cannot be written.
    #[error("write the archive of the container")]
    Output(#[source] holdfast_archive::Error),
    /// It is not an OCI image layout.
    #[error("{} is not an image layout: {reason}", path.display())]
    NoLayout {
        /// The folder or archive.
        path: PathBuf,
        /// What is missing.
        reason: String,
    },
    /// An archive on the input is one of images, not of files.
    #[error("{origin} is an archive of images, not of the files of a root folder")]
    IsImage {
        /// The archive.
        origin: String,
    },
    /// No image of a layout has the requested name.
    #[error("there is no image {reference:?} in the layout; it has {}", listed(present))]
    NoSuchImage {
        /// The requested tag or digest.
        reference: String,
        /// All names.
        present: Vec<String>,
    },
    /// The layout has several images, and none was chosen.
    #[error("the layout has several images, choose one: {}", listed(present))]
    SeveralImages {
        /// All names.
        present: Vec<String>,
    },
    /// The image does not exist for the platform.
    #[error("the image is not made for {wanted}; it is made for {}", listed(present))]
    NoPlatform {
        /// The requested platform.
        wanted: String,
        /// The platforms of the image.
        present: Vec<String>,
    },
    /// A blob of an image is missing, or is not what its digest says.
    #[error("blob {digest} of the image: {reason}")]
    BadBlob {
        /// Its name.
        digest: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A document of an image cannot be understood.
    #[error("{document} of the image: {reason}")]
    BadDocument {
        /// Which one.
        document: String,
        /// What is wrong with it.
        reason: String,
    },
}

fn listed(names: &[String]) -> String {
    const COUNT_MAX: usize = 20;
    let shown = names.iter().take(COUNT_MAX).cloned().collect::<Vec<_>>().join(", ");
    match names.len().saturating_sub(COUNT_MAX) {
        _ if names.is_empty() => "none".to_owned(),
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}
