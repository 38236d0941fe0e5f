//! Replication of host snapshots: the operations of each side.
//!
//! A side never removes a snapshot, and changes the content of a dataset only by receiving. It discards only
//! partially received snapshots.

use serde::{Deserialize, Serialize};

use super::incoming::Incoming;
use super::{ProviderError, ProviderKind, ProviderResult};
use crate::system::process::Piped;

/// Prefix of the tags of Holdfast's holds, and of the names of its bookmarks.
pub const REPLICA_TAG: &str = "holdfast-replicate-";

/// The features of a side.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReplicaAbilities {
    /// Bookmarks, which keep the identity of a removed snapshot.
    pub bookmarks: bool,
    /// Sending blocks as they are stored: compressed, large, and encrypted.
    pub sends_as_stored: bool,
    /// Several snapshots in one stream.
    pub joins: bool,
}

/// A host snapshot or bookmark in a replication.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReplicaSnapshot {
    /// The name in the dataset.
    pub name: String,
    /// The identity that a snapshot shares with its copies; empty if unknown.
    pub identity: String,
    /// The creation time, in seconds since 1970-01-01 UTC.
    pub time_s: i64,
    /// Whether it is a bookmark.
    pub is_bookmark: bool,
    /// Number of holds.
    pub hold_count: u64,
    /// Holdfast's record of the snapshot.
    pub record: Option<String>,
}

/// A dataset in a replication.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReplicaDataset {
    /// The name.
    pub name: String,
    /// The snapshots and bookmarks, the oldest first.
    pub snapshots: Vec<ReplicaSnapshot>,
    /// The state of a partial receive, if there is one.
    pub partial: Option<PartialReceive>,
    /// Whether the file system encrypts the dataset.
    pub is_encrypted: bool,
}

/// The state of an interrupted receive.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum PartialReceive {
    /// The token from which the sender resumes.
    Token(String),
    /// The snapshot from which the sender has to start again.
    Remains(String),
}

/// A stream to send.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SendRequest {
    /// The dataset.
    pub dataset: String,
    /// A snapshot or bookmark that the other side has; none to send everything.
    pub base: Option<ReplicaBase>,
    /// The snapshot to send.
    pub to: String,
    /// Whether all snapshots in between are included.
    pub is_joined: bool,
    /// The form of the blocks.
    pub form: StreamForm,
    /// Resumes a partial receive. If set, all other fields but the dataset are ignored.
    pub token: Option<String>,
    /// When the stream is compressed by zstd.
    pub packing: PackWhen,
}

/// When a stream is compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum PackWhen {
    /// Never.
    Never,
    /// If the link is slower than the compression.
    WhereSlow,
    /// Always.
    Always,
}

/// The common snapshot or bookmark.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReplicaBase {
    /// The name.
    pub name: String,
    /// Whether it is a bookmark at the sender.
    pub is_bookmark: bool,
}

/// The form of the blocks in a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum StreamForm {
    /// Uncompressed and decrypted, as a program reads them.
    Plain,
    /// Compressed and large blocks as they are stored.
    AsStored,
    /// As stored, including encryption.
    Raw,
}

/// A stream to receive.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReceiveRequest {
    /// The dataset.
    pub dataset: String,
    /// The announced snapshots, the oldest first; empty if unknown. A resumed stream contains one of them.
    pub snapshots: Vec<ReplicaSnapshot>,
    /// Whether the stream is compressed by zstd.
    pub is_packed: bool,
}

/// A hold or bookmark of the common snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KeepRequest {
    /// The dataset.
    pub dataset: String,
    /// The common snapshot.
    pub snapshot: String,
    /// The name of the hold or bookmark.
    pub tag: String,
    /// The method.
    pub means: KeepMethod,
}

/// How the common snapshot is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum KeepMethod {
    /// Adds a hold, and keeps existing holds.
    HoldToo,
    /// Adds a hold, and releases all others.
    Hold,
    /// Creates a bookmark of it, and releases all holds.
    Bookmark,
}

/// How far the sending host is trusted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SenderTrust {
    /// The sender is this host, or a host that may run any command on this host.
    Full,
    /// The sender may add the announced snapshots, and nothing else.
    AddOnly,
}

/// One side of a replication.
pub trait ReplicaSide: Send + Sync {
    /// The provider of the datasets.
    fn kind(&self) -> ProviderKind;

    /// The host; none for this host.
    fn host(&self) -> Option<&str>;

    /// The features of this side.
    fn abilities(&self) -> ProviderResult<ReplicaAbilities>;

    /// A dataset, with its descendants on request; empty if the dataset does not exist.
    fn datasets(&self, name: &str, is_tree: bool) -> ProviderResult<Vec<ReplicaDataset>>;

    /// The size of a stream in bytes; none if unknown.
    ///
    /// # Errors
    /// The stream cannot be sent.
    fn estimate(&self, sending: &SendRequest) -> ProviderResult<Option<u64>>;

    /// Starts to send. The stream is on the standard output of the program.
    fn send(&self, sending: &SendRequest) -> ProviderResult<Piped>;

    /// Starts to receive a stream, through the gate in the result. Missing parents of the dataset are created.
    /// Nothing is mounted.
    fn receive(&self, receiving: &ReceiveRequest, trust: SenderTrust) -> ProviderResult<Incoming>;

    /// Checks that the snapshots exist with their identities, and writes the records of snapshots that have none.
    fn settle(&self, receiving: &ReceiveRequest) -> ProviderResult<()>;

    /// Discards a partial receive.
    fn discard(&self, dataset: &str) -> ProviderResult<()>;

    /// Keeps the common snapshot by a hold or bookmark.
    fn keep(&self, keeping: &KeepRequest) -> ProviderResult<()>;

    /// Converts a message of a program to an error.
    fn refusal(&self, action: &'static str, what: &str, stderr: &str) -> ProviderError;

    /// Whether this side can compress streams in this case before it sends them.
    fn can_pack(&self, when: PackWhen) -> bool;

    /// Whether this side can decompress streams before it receives them.
    fn can_unpack(&self) -> bool;
}

/// Refuses tags that do not belong to Holdfast's holds.
pub(super) fn check_tag(tag: &str) -> ProviderResult<()> {
    if tag.starts_with(REPLICA_TAG) {
        return super::folder::check_name(tag);
    }
    Err(ProviderError::Name {
        name: tag.to_owned(),
        reason: "it is not the tag of a replication",
    })
}
