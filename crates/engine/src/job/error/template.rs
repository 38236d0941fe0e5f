//! Errors of templates.

use holdfast_host::SshSignatureError;
use holdfast_repo::SnapshotId;
use jiff::Timestamp;

use super::Error;

/// Why an operation on a template fails.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TemplateError {
    /// The name is not a valid name of a template.
    #[error("{name:?} is no name of a template: words of letters, digits, '.', '_' and '-', with '/' between them")]
    Name {
        /// The name as given.
        name: String,
    },
    /// The tag is not valid.
    #[error("{tag:?} is no tag: letters, digits, '.', '_' and '-'")]
    Tag {
        /// The tag as given.
        tag: String,
    },
    /// The text after the `@` is not a digest.
    #[error("{digest:?} is no digest, which has at least 8 hexadecimal digits")]
    Digest {
        /// The text after the `@`.
        digest: String,
    },
    /// The statement of the template cannot be written.
    #[error("the template cannot be pushed: {reason}")]
    Unsayable {
        /// Why not.
        reason: &'static str,
    },
    /// The statement of a template is invalid.
    #[error("the statement of the template makes no sense: {reason}")]
    Statement {
        /// What is wrong.
        reason: &'static str,
    },
    /// A later version of Holdfast pushed the template.
    #[error("the template has a statement of version {version}, and this program knows version 1")]
    FutureVersion {
        /// The version.
        version: String,
    },
    /// The statement contradicts the snapshot.
    #[error("snapshot {id} is not what the statement of its template says: {reason}")]
    Contradiction {
        /// The snapshot.
        id: SnapshotId,
        /// What differs.
        reason: String,
    },
    /// The template does not exist.
    #[error("there is no template {wanted}{}", suggestion(similar))]
    Unknown {
        /// The requested template.
        wanted: String,
        /// Similar names and tags.
        similar: Vec<String>,
    },
    /// Several digests start with the requested digits.
    #[error("{wanted} is ambiguous: it could be {}", contents.join(" or "))]
    Ambiguous {
        /// The requested digits.
        wanted: String,
        /// The matching digests.
        contents: Vec<String>,
    },
    /// The named snapshot is a template.
    #[error("snapshot {id} is the template {name}")]
    IsTemplate {
        /// The snapshot.
        id: SnapshotId,
        /// The template's name.
        name: String,
    },
    /// The tag exists with other content.
    #[error("{label} already exists with other content, of {time}")]
    TagTaken {
        /// Name and tag.
        label: String,
        /// When the existing content was pushed.
        time: Timestamp,
    },
    /// The existing template was pushed in the future.
    #[error(
        "{label} was pushed at {time}, which is in the future: the clock of this host or of the other host is wrong"
    )]
    FromTheFuture {
        /// Name and tag.
        label: String,
        /// The time of the push in its statement.
        time: Timestamp,
    },
    /// Removing the template would make the tag refer to older content again.
    #[error("{label} currently refers to {content}: without it, the tag would refer to its previous content again")]
    IsCurrent {
        /// Name and tag.
        label: String,
        /// The digest of the content.
        content: String,
    },
    /// A push was considered dead while it was running.
    #[error(
        "the push was considered dead while it ran, and another process may have pushed to the tag: nothing was pushed"
    )]
    LostClaim,
    /// A template is pushed from disks, not from a stream.
    #[error("a template is made of images, not of standard input")]
    NoStream,
    /// The snapshot has disks that were read from a stream.
    #[error("{name} of snapshot {id} was backed up as a stream, and is not a disk")]
    StreamDisk {
        /// The snapshot.
        id: SnapshotId,
        /// Its name.
        name: String,
    },
    /// The template has no signature.
    #[error("{label} has no signature")]
    Unsigned {
        /// Name and tag.
        label: String,
    },
    /// The file with the trusted signers does not exist.
    #[error("{label} is signed by {key}, and no file of allowed signers is given")]
    NoSigners {
        /// Name and tag.
        label: String,
        /// The signing key.
        key: String,
    },
    /// The template is signed by a key that is not trusted.
    #[error("{label} is signed by {key}, which does not count: {reason}")]
    NotAllowed {
        /// Name and tag.
        label: String,
        /// The key.
        key: String,
        /// Why not.
        reason: String,
    },
    /// The template is signed by a revoked key.
    #[error("{label} is signed by {key}, which was revoked")]
    Revoked {
        /// Name and tag.
        label: String,
        /// The key.
        key: String,
    },
    /// The signature does not match the statement.
    #[error("the signature of {label} does not match its content: {reason}")]
    BadSignature {
        /// Name and tag.
        label: String,
        /// The message of ssh-keygen.
        reason: String,
    },
    /// The content does not match the statement.
    #[error("{name} is not what was signed: its content has another digest, and was not kept")]
    OtherContent {
        /// The disk or file.
        name: String,
    },
    /// A signature that was just made does not match the statement.
    #[error("what ssh-keygen has signed does not verify: {reason}")]
    SignedWrong {
        /// The message of ssh-keygen.
        reason: String,
    },
    /// The template has several disks or a configuration, but the target is one image.
    #[error("{label} has {disk_count} disks, and {} holds one", target.display())]
    SeveralDisks {
        /// Name and tag.
        label: String,
        /// Number of disks.
        disk_count: usize,
        /// The image.
        target: std::path::PathBuf,
    },
    /// The configuration cannot be adapted to its new place.
    #[error("the configuration in {label} cannot be used: {reason}")]
    Configuration {
        /// Name and tag.
        label: String,
        /// Why not.
        reason: String,
    },
    /// ssh-keygen failed.
    #[error(transparent)]
    Signatures(#[from] SshSignatureError),
}

impl From<TemplateError> for Error {
    fn from(error: TemplateError) -> Self {
        Self::Template(Box::new(error))
    }
}

fn suggestion(similar: &[String]) -> String {
    if similar.is_empty() {
        return String::new();
    }
    format!("; there is {}", similar.join(", "))
}
