//! Host snapshots that go from one host to another: what each side of it can do.
//!
//! A side never takes a snapshot away, and never changes what a dataset holds but by receiving. What it discards is what was received
//! in part.

use serde::{Deserialize, Serialize};

use super::incoming::Incoming;
use super::{ProviderError, ProviderKind, ProviderResult};
use crate::system::process::Piped;

/// What begins the tag of our holds, and the names of our bookmarks.
pub const REPLICA_TAG: &str = "holdfast-replicate-";

/// What a side can do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReplicaAbilities {
    /// It keeps the identity of a snapshot that is gone.
    pub bookmarks: bool,
    /// It sends blocks as they lie on its disks: compressed, large, and encrypted where they are.
    pub sends_as_stored: bool,
    /// One stream brings several snapshots.
    pub joins: bool,
}

/// A host snapshot as replication sees it, or a bookmark.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReplicaSnapshot {
    /// Its own name.
    pub name: String,
    /// What it has in common with its copies; empty where nothing tells.
    pub identity: String,
    /// When it was made, in seconds since 1970-01-01 UTC.
    pub time_s: i64,
    /// Whether it is a bookmark.
    pub is_bookmark: bool,
    /// How many hold it.
    pub hold_count: u64,
    /// Our record of it.
    pub record: Option<String>,
}

/// A dataset as replication sees it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReplicaDataset {
    /// Its name.
    pub name: String,
    /// Its snapshots and bookmarks, the oldest first.
    pub snapshots: Vec<ReplicaSnapshot>,
    /// What was received in part: a text by which the other side goes on, or the name of what is incomplete.
    pub partial: Option<PartialReceive>,
    /// Whether it is encrypted by its file system.
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
    /// What the other side has: a snapshot, or a bookmark. None where all is sent.
    pub base: Option<ReplicaBase>,
    /// The snapshot.
    pub to: String,
    /// With all those between.
    pub is_joined: bool,
    /// Blocks as they lie on the disks.
    pub form: StreamForm,
    /// Goes on with what was received in part; then nothing else of this counts.
    pub token: Option<String>,
    /// Whether it is packed by zstd.
    pub packing: PackWhen,
}

/// When a stream is packed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum PackWhen {
    /// Never.
    Never,
    /// Where the link is slower than that.
    WhereSlow,
    /// Always.
    Always,
}

/// What the other side has.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReplicaBase {
    /// Its name.
    pub name: String,
    /// Whether it is a bookmark at the sender.
    pub is_bookmark: bool,
}

/// How blocks are sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum StreamForm {
    /// As a program would read them.
    Plain,
    /// Compressed and large as they are.
    AsStored,
    /// The same, and encrypted.
    Raw,
}

/// A stream to receive.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReceiveRequest {
    /// Into which dataset.
    pub dataset: String,
    /// What comes, the oldest first. Where a stream goes on, one of these comes; nothing where nobody knows which.
    pub snapshots: Vec<ReplicaSnapshot>,
    /// Packed by zstd.
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
    /// Holds it, in addition to existing holds.
    HoldToo,
    /// Holds it, and releases all others.
    Hold,
    /// Creates a bookmark of it, and releases all holds.
    Bookmark,
}

/// The trust in the sending host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SenderTrust {
    /// It is this host, or one that may run any command here.
    Full,
    /// It may add the snapshots that were announced, and nothing else.
    AddOnly,
}

/// One side of a replication.
pub trait ReplicaSide: Send + Sync {
    /// Whose datasets they are.
    fn kind(&self) -> ProviderKind;

    /// The host; none for this one.
    fn host(&self) -> Option<&str>;

    /// What it can do.
    fn abilities(&self) -> ProviderResult<ReplicaAbilities>;

    /// A dataset, with all below it where they are asked for; none where there is none.
    fn datasets(&self, name: &str, is_tree: bool) -> ProviderResult<Vec<ReplicaDataset>>;

    /// Bytes of a stream; none where nobody knows before.
    ///
    /// # Errors
    /// It cannot be sent.
    fn estimate(&self, sending: &SendRequest) -> ProviderResult<Option<u64>>;

    /// Sends: the stream is on the standard output.
    fn send(&self, sending: &SendRequest) -> ProviderResult<Piped>;

    /// Receives a stream, which passes the gate of what this gives. What is missing above the dataset is made; nothing is mounted.
    fn receive(&self, receiving: &ReceiveRequest, trust: SenderTrust) -> ProviderResult<Incoming>;

    /// Looks whether the snapshots are there, with their identities, and notes the records of those that have none.
    fn settle(&self, receiving: &ReceiveRequest) -> ProviderResult<()>;

    /// Discards what was received in part.
    fn discard(&self, dataset: &str) -> ProviderResult<()>;

    /// Keeps a snapshot.
    fn keep(&self, keeping: &KeepRequest) -> ProviderResult<()>;

    /// What a complaint of a program means.
    fn refusal(&self, action: &'static str, what: &str, complaint: &str) -> ProviderError;

    /// Whether it packs streams so before it sends them.
    fn can_pack(&self, when: PackWhen) -> bool;

    /// Whether it unpacks streams before it receives them.
    fn can_unpack(&self) -> bool;
}

/// The tags of our holds, and nobody else's.
pub(super) fn check_tag(tag: &str) -> ProviderResult<()> {
    if tag.starts_with(REPLICA_TAG) {
        return super::folder::check_name(tag);
    }
    Err(ProviderError::Name {
        name: tag.to_owned(),
        reason: "it is no tag of a replication",
    })
}
