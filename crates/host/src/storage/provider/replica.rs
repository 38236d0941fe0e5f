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
    /// All snapshots between two in one stream, as `zfs send -I` does.
    #[serde(rename = "joins")]
    pub sends_intermediates: bool,
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
    /// It cannot be resumed: the snapshot that has to be sent again from its beginning.
    #[serde(rename = "Remains")]
    NotResumable(String),
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
    #[serde(rename = "is_joined")]
    pub has_intermediates: bool,
    /// The form of the blocks.
    pub form: StreamForm,
    /// Resumes a partial receive. If set, all other fields but the dataset are ignored.
    pub token: Option<String>,
    /// When the stream is compressed by zstd.
    #[serde(rename = "packing")]
    pub compression: StreamCompression,
}

/// When the sender compresses a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum StreamCompression {
    /// Never.
    Never,
    /// While the link is slower than the compression.
    #[serde(rename = "WhereSlow")]
    Adaptive,
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
    #[serde(rename = "is_packed")]
    pub is_compressed: bool,
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
    #[serde(rename = "means")]
    pub method: KeepMethod,
}

/// How the common snapshot is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum KeepMethod {
    /// Adds a hold, and keeps existing holds.
    #[serde(rename = "HoldToo")]
    AddHold,
    /// Adds a hold, and releases all others.
    #[serde(rename = "Hold")]
    ReplaceHolds,
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

/// Which datasets are replicated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReplicaScope {
    /// One dataset.
    Dataset,
    /// A dataset and its descendants.
    Tree,
}

/// One side of a replication.
pub trait ReplicaSide: Send + Sync {
    /// The provider of the datasets.
    fn kind(&self) -> ProviderKind;

    /// The host; none for this host.
    fn host(&self) -> Option<&str>;

    /// The features of this side.
    fn abilities(&self) -> ProviderResult<ReplicaAbilities>;

    /// The datasets of a scope; empty if the dataset does not exist.
    fn datasets(&self, name: &str, scope: ReplicaScope) -> ProviderResult<Vec<ReplicaDataset>>;

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
    fn can_compress(&self, compression: StreamCompression) -> bool;

    /// Whether this side can decompress streams before it receives them.
    fn can_decompress(&self) -> bool;
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

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{KeepMethod, KeepRequest, PartialReceive, ReceiveRequest, ReplicaAbilities, SendRequest};
    use super::{StreamCompression, StreamForm};

    /// Both ends of a replication may be of different releases: the names in requests and answers never change.
    #[test]
    fn names_of_the_protocol_never_change() {
        let sending = SendRequest {
            dataset: "tank/a".to_owned(),
            base: None,
            to: "b".to_owned(),
            has_intermediates: true,
            form: StreamForm::AsStored,
            token: None,
            compression: StreamCompression::Adaptive,
        };
        let expected = json!({ "dataset": "tank/a", "base": null, "to": "b", "is_joined": true, "form": "AsStored",
            "token": null, "packing": "WhereSlow" });
        assert_eq!(json!(sending), expected);
        let receiving = ReceiveRequest {
            dataset: "tank/a".to_owned(),
            snapshots: Vec::new(),
            is_compressed: true,
        };
        assert_eq!(
            json!(receiving),
            json!({ "dataset": "tank/a", "snapshots": [], "is_packed": true })
        );
        let keeping = KeepRequest {
            dataset: "tank/a".to_owned(),
            snapshot: "b".to_owned(),
            tag: "t".to_owned(),
            method: KeepMethod::AddHold,
        };
        let expected = json!({ "dataset": "tank/a", "snapshot": "b", "tag": "t", "means": "HoldToo" });
        assert_eq!(json!(keeping), expected);
        assert_eq!(
            json!([KeepMethod::ReplaceHolds, KeepMethod::Bookmark]),
            json!(["Hold", "Bookmark"])
        );
        let abilities = json!({ "bookmarks": false, "sends_as_stored": false, "joins": false });
        assert_eq!(json!(ReplicaAbilities::default()), abilities);
        let partial = [
            PartialReceive::NotResumable("b".to_owned()),
            PartialReceive::Token("t".to_owned()),
        ];
        assert_eq!(json!(partial), json!([{ "Remains": "b" }, { "Token": "t" }]));
    }
}
