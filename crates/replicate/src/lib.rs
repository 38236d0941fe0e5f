//! `replicate`: the host snapshots of a dataset go to another place, and to another host.
//!
//! For each dataset:
//!
//! 1. Both sides are asked what they have; what is to be sent follows from that alone (`holdfast_policy::plan_replication`).
//! 2. What was cut last time goes on where it was cut, where ZFS can; what is of no use any more is discarded.
//! 3. Each stream: the snapshot is held at the source, sent, received, and looked for at the target.
//! 4. The newest that both have is held at the target; at the source a bookmark of it stays, or it is held. Only then those before are let
//!    go, so at every moment there is one that both have and that is not removed.
//!
//! Nothing at the target is rolled back or removed. Where that would be needed, the dataset is left alone, with the commands to choose from.

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
use holdfast_host::provider::{REPLICA_TAG, ReplicaAbilities, ReplicaDataset, ReplicaSide, StreamCompression};
use holdfast_policy::SnapshotChoice;

use holdfast_engine::Execution;
use holdfast_engine::{Job, Result};
pub use peer::{PEER_PROTOCOL, PeerSide};
pub use peer_server::{PeerServer, serve_peer};

/// What is replicated, and how.
pub struct ReplicateRequest<'a> {
    /// Where from.
    pub source: ReplicationPlace<'a>,
    /// Where to.
    pub target: ReplicationPlace<'a>,
    /// With all datasets below.
    pub is_tree: bool,
    /// Whether a snapshot of this name is sent.
    pub is_wanted: &'a dyn Fn(&str) -> bool,
    /// All of them, or the newest.
    pub choice: SnapshotChoice,
    /// Whether blocks that are encrypted are sent as they are.
    pub raw: RawChoice,
    /// Whether streams are compressed on their way.
    pub compression: CompressionChoice,
    /// Bytes each second that go over the link, at most.
    pub limit: Option<NonZeroU64>,
    /// Whether anything is changed.
    pub execution: Execution,
    /// The name of this host.
    pub here: String,
    /// Where runs on this host keep each other away.
    pub locks: PathBuf,
    /// The clock of all threads.
    pub clock: Arc<dyn Clock>,
}

/// A dataset somewhere.
#[derive(Clone, Copy)]
pub struct ReplicationPlace<'a> {
    /// Where.
    pub side: &'a dyn ReplicaSide,
    /// Its name there.
    pub dataset: &'a str,
}

/// Whether blocks that are encrypted are sent as they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RawChoice {
    /// Where the source is encrypted, and the target is, or is new.
    Auto,
    /// Yes.
    Raw,
    /// As a program would read them: the target encrypts by itself, or does not.
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

/// What happened to it.
#[derive(Debug, Clone, Default)]
pub struct ReplicateReport {
    /// Each dataset of the source, by name.
    pub datasets: Vec<ReplicatedDataset>,
}

/// What happened to a dataset.
#[derive(Debug, Clone)]
pub struct ReplicatedDataset {
    /// Its name at the source.
    pub source: String,
    /// Its name at the target.
    pub target: String,
    /// The newest snapshot that is wanted of the source, and when it was made, in seconds since 1970-01-01 UTC.
    pub newest_here: Option<(String, i64)>,
    /// The newest of the target.
    pub newest_there: Option<(String, i64)>,
    /// The newest that both have.
    pub common: Option<String>,
    /// Snapshots that the target lacks.
    pub behind_count: usize,
    /// How much older what the target has is, in seconds.
    pub behind_s: Option<i64>,
    /// Whether a stream that was cut can go on.
    pub is_resumable: bool,
    /// What was sent, or would be.
    pub streams: Vec<ReplicatedStream>,
    /// How it stands.
    pub outcome: ReplicaOutcome,
    /// What a person may want to know.
    pub notes: Vec<String>,
}

/// A stream that was sent, or would be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReplicatedStream {
    /// What the target had; none where everything was sent, or it is not known.
    pub base: Option<String>,
    /// What it has now; none where a stream was resumed for which it is not known.
    pub to: Option<String>,
    /// How many snapshots it brought.
    pub count: usize,
    /// Whether it went on where one was cut.
    pub is_resumed: bool,
    /// Its bytes; as far as they are known before in a dry run.
    pub stream_bytes: Option<u64>,
    /// Those that went over the link.
    pub link_bytes: Option<u64>,
}

/// How a dataset stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReplicaOutcome {
    /// The target has all there is.
    UpToDate,
    /// It has now.
    Sent,
    /// It would have.
    Planned,
    /// The source has no snapshot that is wanted.
    Nothing,
    /// The target has what the source has not: what, and what to do.
    Diverged {
        /// What.
        reason: String,
        /// What to do.
        advice: String,
    },
    /// Another run is at it.
    Busy,
    /// It did not work.
    Failed(String),
}

/// The sides, and what they can do.
struct ReplicationSides<'a> {
    request: &'a ReplicateRequest<'a>,
    source: ReplicaAbilities,
    target: ReplicaAbilities,
    filter: carry::LinkFilter,
    sender_compression: StreamCompression,
    job: Job<'a>,
}

/// Replicates. A dataset that fails does not keep the others.
///
/// # Errors
/// A side cannot be asked, or there is nothing to replicate.
pub fn replicate(request: &ReplicateRequest<'_>, job: Job<'_>) -> Result<ReplicateReport> {
    let ReplicationPlace { side, dataset } = request.source;
    let mut found = side.datasets(dataset, request.is_tree)?;
    if found.is_empty() {
        return Err(holdfast_host::provider::ProviderError::NotFound {
            what: format!(
                "{}{dataset}",
                side.host().map(|host| format!("{host}:")).unwrap_or_default()
            ),
        }
        .into());
    }
    let received = request.target.side.datasets(request.target.dataset, request.is_tree)?;
    if side.host() == request.target.side.host() {
        // What is received into the tree itself is no part of what is sent.
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

/// What a dataset of the source is called at the target.
fn target_name(request: &ReplicateRequest<'_>, source: &str) -> String {
    let below = source.strip_prefix(request.source.dataset).unwrap_or_default();
    format!("{}{below}", request.target.dataset)
}

/// A dataset of the target that has snapshots of this one, and the name of none at the source: it had another name once.
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

/// Which side compresses, and when: only where the other side is another host that can.
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

/// In whose name the common snapshot is kept: that of the target.
fn tag(request: &ReplicateRequest<'_>, target: &str) -> String {
    let host = request.target.side.host().unwrap_or(&request.here);
    let host = host.rsplit('@').next().unwrap_or(host);
    format!("{REPLICA_TAG}{:016x}", fingerprint(&format!("{host}:{target}")))
}

/// FNV-1a: the same for ever, for names that are not chosen to collide.
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
