//! What can be wrong with templates.

use holdfast_host::SshSignatureError;
use holdfast_repo::SnapshotId;
use jiff::Timestamp;

use super::Error;

/// Why something is not done with a template.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TemplateError {
    /// No template can have this name.
    #[error("{name:?} is no name of a template: words of letters, digits, '.', '_' and '-', with '/' between them")]
    Name {
        /// The name as given.
        name: String,
    },
    /// No tag can have this name.
    #[error("{tag:?} is no tag: letters, digits, '.', '_' and '-'")]
    Tag {
        /// The tag as given.
        tag: String,
    },
    /// What follows the `@` is no digest.
    #[error("{digest:?} is no digest: give 8 hexadecimal digits of it at least")]
    Digest {
        /// The text after the `@`.
        digest: String,
    },
    /// What a template is cannot be written down.
    #[error("the template cannot be pushed: {reason}")]
    Unsayable {
        /// Why not.
        reason: &'static str,
    },
    /// The text in a template that says what it is makes no sense.
    #[error("the statement of the template makes no sense: {reason}")]
    Statement {
        /// What is wrong.
        reason: &'static str,
    },
    /// A later program has pushed it.
    #[error("the template has a statement of version {version}, and this program knows version 1")]
    FutureVersion {
        /// The version.
        version: String,
    },
    /// What the statement says is not what the snapshot has.
    #[error("snapshot {id} is not what the statement of its template says: {reason}")]
    Contradiction {
        /// The snapshot.
        id: SnapshotId,
        /// What differs.
        reason: String,
    },
    /// There is no such template.
    #[error("there is no template {wanted}{}", suggestion(similar))]
    Unknown {
        /// What was asked for.
        wanted: String,
        /// Names and tags that are there.
        similar: Vec<String>,
    },
    /// A digest begins as was asked for of several.
    #[error("{wanted} is ambiguous: it could be {}", contents.join(" or "))]
    Ambiguous {
        /// What was asked for.
        wanted: String,
        /// The digests.
        contents: Vec<String>,
    },
    /// A snapshot was named that is a template.
    #[error("snapshot {id} is the template {name}")]
    IsTemplate {
        /// The snapshot.
        id: SnapshotId,
        /// The template's name.
        name: String,
    },
    /// A tag is there with other content.
    #[error("{label} is there already, with other content, of {time}")]
    TagTaken {
        /// Name and tag.
        label: String,
        /// When that was pushed.
        time: Timestamp,
    },
    /// What is there was pushed after now.
    #[error("{label} was pushed at {time}, which is still to come: the clock here is wrong, or was wrong there")]
    FromTheFuture {
        /// Name and tag.
        label: String,
        /// When it says that it was pushed.
        time: Timestamp,
    },
    /// What was removed would bring back what a tag meant before.
    #[error("{content} is what {label} means now: without it, the tag would go back to what it meant before")]
    IsCurrent {
        /// Name and tag.
        label: String,
        /// The content.
        content: String,
    },
    /// A push was taken for dead while it worked.
    #[error(
        "the push was taken for dead while it ran, and another process may push to the tag by now: nothing was pushed"
    )]
    LostClaim,
    /// A template is pushed of disks, not of a stream.
    #[error("a template is made of images, not of standard input")]
    NoStream,
    /// A machine's snapshot has disks whose bytes came as a stream.
    #[error("{name} of snapshot {id} was backed up as a stream, and is not a disk")]
    StreamDisk {
        /// The snapshot.
        id: SnapshotId,
        /// Its name.
        name: String,
    },
    /// It has no signature.
    #[error("{label} has no signature")]
    Unsigned {
        /// Name and tag.
        label: String,
    },
    /// There is no file that lists the trusted signers.
    #[error("{label} is signed by {key}, and no file of allowed signers is given")]
    NoSigners {
        /// Name and tag.
        label: String,
        /// The key.
        key: String,
    },
    /// It is signed by a key that does not count.
    #[error("{label} is signed by {key}, which does not count: {reason}")]
    NotAllowed {
        /// Name and tag.
        label: String,
        /// The key.
        key: String,
        /// Why not.
        reason: String,
    },
    /// It is signed by a key that was revoked.
    #[error("{label} is signed by {key}, which was revoked")]
    Revoked {
        /// Name and tag.
        label: String,
        /// The key.
        key: String,
    },
    /// The signature is not of the statement.
    #[error("the signature of {label} is not of what it says: {reason}")]
    BadSignature {
        /// Name and tag.
        label: String,
        /// What ssh-keygen says.
        reason: String,
    },
    /// The content is not what was stated.
    #[error("{name} is not what was signed: its content has another digest, and was not kept")]
    OtherContent {
        /// The disk or file.
        name: String,
    },
    /// A signature that was made does not fit the statement.
    #[error("what ssh-keygen has signed does not verify: {reason}")]
    SignedWrong {
        /// What ssh-keygen says.
        reason: String,
    },
    /// A template of several disks, or with a configuration, where one image was asked for.
    #[error("{label} has {disk_count} disks, and {} holds one", target.display())]
    SeveralDisks {
        /// Name and tag.
        label: String,
        /// How many disks.
        disk_count: usize,
        /// The image.
        target: std::path::PathBuf,
    },
    /// The configuration cannot be changed for its new place.
    #[error("the configuration in {label} cannot be used: {reason}")]
    Configuration {
        /// Name and tag.
        label: String,
        /// Why not.
        reason: String,
    },
    /// ssh-keygen gave no answer.
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
