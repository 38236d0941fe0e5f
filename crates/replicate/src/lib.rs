//! `replicate`: copies the host snapshots of a dataset to another dataset, on this host or on another one.
//!
//! For each dataset:
//!
//! 1. Both sides list their snapshots. The plan of what to send depends on these lists alone
//!    (`holdfast_policy::plan_replication`).
//! 2. An interrupted stream is resumed, if the provider can (ZFS). Leftovers that cannot be resumed are discarded.
//! 3. For each stream: the snapshot is held at the source, sent, received, and checked at the target.
//! 4. The newest common snapshot is held at the target. At the source a bookmark of it is kept, or the snapshot is
//!    held. Only then are the previous ones released, so that at every moment one common snapshot exists that is
//!    protected from removal.
//!
//! Nothing at the target is rolled back or removed. If that would be necessary, the dataset is not replicated, and the
//! report gives commands to choose from.

mod carry;
mod compression;
mod dataset;
#[cfg(feature = "hostile")]
#[doc(hidden)]
pub mod hostile;
mod peer;
mod peer_server;
mod plan;

use std::num::NonZeroU64;
use std::path::PathBuf;
use std::sync::Arc;

use holdfast_block::Clock;
use holdfast_host::provider::{
    REPLICA_TAG, ReplicaAbilities, ReplicaDataset, ReplicaScope, ReplicaSide, StreamCompression,
};
use holdfast_policy::SnapshotChoice;

use holdfast_engine::Execution;
use holdfast_engine::{Job, Result};
pub use peer::{PEER_PROTOCOL, PeerSide};
pub use peer_server::{PeerServer, serve_peer};

/// The options of a replication.
pub struct ReplicateRequest<'a> {
    /// The source.
    pub source: ReplicationPlace<'a>,
    /// The target.
    pub target: ReplicationPlace<'a>,
    /// Whether all datasets below are replicated too.
    pub scope: ReplicaScope,
    /// Whether a snapshot of this name is sent.
    pub is_wanted: &'a dyn Fn(&str) -> bool,
    /// All new snapshots, or only the newest.
    pub choice: SnapshotChoice,
    /// Whether encrypted blocks are sent as they are stored.
    pub raw: RawChoice,
    /// Whether streams are compressed on their way.
    pub compression: CompressionChoice,
    /// Maximum rate over the link, in bytes per second.
    pub limit: Option<NonZeroU64>,
    /// Dry run, or execution.
    pub execution: Execution,
    /// The name of this host.
    pub here: String,
    /// The folder of lock files, which prevent concurrent replications to one target by this host.
    pub locks: PathBuf,
    /// The clock of all threads.
    pub clock: Arc<dyn Clock>,
}

/// A dataset on one side of the replication.
#[derive(Clone, Copy)]
pub struct ReplicationPlace<'a> {
    /// The side that the dataset is on.
    pub side: &'a dyn ReplicaSide,
    /// The name of the dataset.
    pub dataset: &'a str,
}

/// Whether encrypted blocks are sent as they are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RawChoice {
    /// Raw, if the source is encrypted, and the target is encrypted or does not exist yet.
    Auto,
    /// Always raw.
    Raw,
    /// Decrypted: the target encrypts the data itself, or does not encrypt it.
    Plain,
}

/// Whether streams are compressed on their way to another host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CompressionChoice {
    /// While the link is slower than the compression.
    Auto,
    /// Always.
    On,
    /// Never.
    Off,
}

/// The result of a replication.
#[derive(Debug, Clone, Default)]
pub struct ReplicateReport {
    /// All datasets of the source, by name.
    pub datasets: Vec<ReplicatedDataset>,
}

/// The result for one dataset.
#[derive(Debug, Clone)]
pub struct ReplicatedDataset {
    /// The name at the source.
    pub source: String,
    /// The name at the target.
    pub target: String,
    /// The newest wanted snapshot of the source, and its creation time in seconds since 1970-01-01 UTC.
    pub newest_here: Option<(String, i64)>,
    /// The newest snapshot of the target, and its creation time.
    pub newest_there: Option<(String, i64)>,
    /// The newest snapshot that both sides have.
    pub common: Option<String>,
    /// Number of wanted snapshots that the target lacks.
    pub behind_count: usize,
    /// How much older the newest snapshot of the target is, in seconds.
    pub behind_s: Option<i64>,
    /// Whether an interrupted stream can be resumed.
    pub is_resumable: bool,
    /// The streams that were sent, or would be sent.
    pub streams: Vec<ReplicatedStream>,
    /// The outcome.
    pub outcome: ReplicaOutcome,
    /// Notes for the user.
    pub notes: Vec<String>,
}

/// A stream that was sent, or would be sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReplicatedStream {
    /// The base that the target had; `None` for a full stream, or if unknown.
    pub base: Option<String>,
    /// The snapshot that the stream ends with; `None` if unknown for a resumed stream.
    pub to: Option<String>,
    /// Number of snapshots in the stream.
    pub count: usize,
    /// Whether the stream resumed an interrupted one.
    pub is_resumed: bool,
    /// Bytes of the uncompressed stream; in a dry run an estimate, if available.
    pub stream_bytes: Option<u64>,
    /// Bytes that were sent over the link.
    pub link_bytes: Option<u64>,
}

/// The outcome of the replication of a dataset.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReplicaOutcome {
    /// The target already had all wanted snapshots.
    UpToDate,
    /// The missing snapshots were sent.
    Sent,
    /// The missing snapshots would be sent (dry run).
    Planned,
    /// The source has no wanted snapshot.
    Nothing,
    /// Source and target have diverged, so nothing can be sent.
    Diverged {
        /// The difference.
        reason: String,
        /// The advised action.
        advice: String,
    },
    /// Another run replicates to the same target.
    Busy,
    /// The replication failed, for this reason.
    Failed(String),
}

/// Both sides of the replication, with their abilities.
struct ReplicationSides<'a> {
    request: &'a ReplicateRequest<'a>,
    source: ReplicaAbilities,
    target: ReplicaAbilities,
    filter: carry::LinkFilter,
    sender_compression: StreamCompression,
    job: Job<'a>,
}

/// Replicates all datasets. If one fails, the others are still replicated.
///
/// # Errors
/// A side cannot be queried, or there is nothing to replicate.
pub fn replicate(request: &ReplicateRequest<'_>, job: Job<'_>) -> Result<ReplicateReport> {
    let ReplicationPlace { side, dataset } = request.source;
    let mut found = side.datasets(dataset, request.scope)?;
    if found.is_empty() {
        return Err(holdfast_host::provider::ProviderError::NotFound {
            what: format!(
                "{}{dataset}",
                side.host().map(|host| format!("{host}:")).unwrap_or_default()
            ),
        }
        .into());
    }
    let received = request.target.side.datasets(request.target.dataset, request.scope)?;
    if side.host() == request.target.side.host() {
        // Datasets that were received into the source tree itself are not sent again.
        let target = request.target.dataset;
        found.retain(|one| !is_below(&one.name, target));
    }
    let (filter, sender_compression) = compression(request);
    let sides = ReplicationSides {
        request,
        source: side.abilities()?,
        target: request.target.side.abilities()?,
        filter,
        sender_compression,
        job,
    };
    let mut report = ReplicateReport::default();
    for (number, one) in (1..).zip(&found) {
        job.interrupt.check()?;
        job.progress.part(number, found.len());
        let target = target_name(request, &one.name);
        let there = received.iter().find(|there| there.name == target);
        let done = match there {
            None => renamed(one, &found, &received, request).map(|was| sides.diverged_by_rename(one, &target, &was)),
            Some(_) => None,
        };
        let done = match done {
            Some(done) => done,
            None => dataset::replicate(&sides, one, &target, there.cloned())?,
        };
        report.datasets.push(done);
    }
    Ok(report)
}

fn is_below(name: &str, above: &str) -> bool {
    let rest = name.strip_prefix(above);
    rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

/// The name of a source dataset at the target.
fn target_name(request: &ReplicateRequest<'_>, source: &str) -> String {
    let below = source.strip_prefix(request.source.dataset).unwrap_or_default();
    format!("{}{below}", request.target.dataset)
}

/// A dataset of the target that has snapshots of `source`, but whose name does not match any dataset of the source: it
/// was renamed.
fn renamed(
    source: &ReplicaDataset,
    all: &[ReplicaDataset],
    received: &[ReplicaDataset],
    request: &ReplicateRequest<'_>,
) -> Option<String> {
    let is_orphan = |there: &&ReplicaDataset| all.iter().all(|one| target_name(request, &one.name) != there.name);
    let knows = |there: &&ReplicaDataset| {
        let identities = there.snapshots.iter().map(|snapshot| &snapshot.identity);
        let mut known = identities.filter(|identity| !identity.is_empty());
        known.any(|identity| source.snapshots.iter().any(|snapshot| snapshot.identity == *identity))
    };
    let was = received.iter().filter(is_orphan).find(knows)?;
    Some(was.name.clone())
}

/// Which side compresses, and when. Streams are only compressed if one side is another host that supports it.
fn compression(request: &ReplicateRequest<'_>) -> (carry::LinkFilter, StreamCompression) {
    use carry::LinkFilter;
    let (source, target) = (request.source.side, request.target.side);
    let (here, there) = match request.compression {
        CompressionChoice::Off => return (LinkFilter::None, StreamCompression::Never),
        CompressionChoice::Auto => (LinkFilter::CompressAdaptively, StreamCompression::Adaptive),
        CompressionChoice::On => (LinkFilter::Compress, StreamCompression::Always),
    };
    if target.host().is_some() && target.can_decompress() {
        return (here, StreamCompression::Never);
    }
    if source.host().is_some() && source.can_compress(there) {
        return (LinkFilter::Decompress, there);
    }
    (LinkFilter::None, StreamCompression::Never)
}

/// The tag that the common snapshot is kept with; it depends on the target.
fn tag(request: &ReplicateRequest<'_>, target: &str) -> String {
    let host = request.target.side.host().unwrap_or(&request.here);
    let host = host.rsplit('@').next().unwrap_or(host);
    format!("{REPLICA_TAG}{:016x}", fingerprint(&format!("{host}:{target}")))
}

/// FNV-1a: the result must never change. The names are not chosen to collide.
fn fingerprint(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |sum, byte| {
        (sum ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use super::{fingerprint, is_below};

    #[test]
    fn the_tag_of_a_target_is_the_same_for_ever() {
        assert_eq!(fingerprint(""), 0xcbf2_9ce4_8422_2325);
        assert_eq!(fingerprint("foobar"), 0x8594_4171_f739_67e8);
    }

    #[test]
    fn a_dataset_is_not_below_one_whose_name_is_a_prefix() {
        assert!(is_below("tank/a", "tank/a") && is_below("tank/a/b", "tank/a"));
        assert!(!is_below("tank/ab", "tank/a") && !is_below("tank", "tank/a"));
    }
}
