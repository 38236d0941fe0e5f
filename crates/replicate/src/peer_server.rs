//! The answering side of the protocol: `holdfast peer`, and `holdfast receive --append-only`.
//!
//! An append-only sender cannot use any request to harm existing data:
//!
//! - it can name only the root dataset and the datasets below it;
//! - every stream is decompressed and checked command by command before a program receives it, and contains one
//!   snapshot with a new name;
//! - the record of a snapshot is written by the process that has received the snapshot, from the data announced before
//!   the stream; `settle` only compares;
//! - all its holds have one tag, that of the root: it holds one snapshot of a dataset, and releases no other hold.
//!
//! There is no request for removing, rolling back or renaming.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::path::Path;
use std::sync::Arc;

use holdfast_block::Clock;
use holdfast_host::provider::{
    Dataset, KeepMethod, KeepRequest, ProviderError, ProviderKind, ProviderResult, REPLICA_TAG, ReceiveRequest,
    ReplicaAbilities, ReplicaScope, ReplicaSide, SendRequest, SenderTrust, StreamCompression,
};
use serde::Serialize;

use super::carry::{LinkFilter, Transfer, TransferOptions};
use super::peer::{PeerAnswer, PeerQuestion, PeerRefusal, PeerRequest};
use super::{fingerprint, is_below};
use holdfast_engine::{Error, Result};

/// Limit of bytes of a request: enough for a stream of thousands of snapshots.
const REQUEST_BYTES_MAX: u64 = 32 << 20;
/// Interval of checks whether a stream has ended.
const LOOK_INTERVAL: std::time::Duration = std::time::Duration::from_millis(3);

/// The answering side of a connection.
pub struct PeerServer<'a> {
    /// Opens a side of this host.
    pub sides: &'a dyn Fn(ProviderKind) -> Box<dyn ReplicaSide>,
    /// The only dataset to which, and below which, the peer may add; `None` if all requests are allowed.
    pub root: Option<Dataset>,
    /// The clock of all threads.
    pub clock: Arc<dyn Clock>,
}

/// The prefix of warnings on standard error. A stream that was received successfully may have some.
const WARNING: &str = "holdfast: warning: ";

/// The warnings in the standard error output of a `holdfast`.
pub(super) fn notes_in(stderr: &str) -> Vec<String> {
    let notes = stderr.lines().filter_map(|line| line.trim().strip_prefix(WARNING));
    notes.map(str::to_owned).collect()
}

/// Answers one request, which is the first line of `input`. Returns warnings.
///
/// # Errors
/// The request is invalid or refused, or a stream is incomplete.
pub fn serve_peer(
    server: &PeerServer<'_>,
    input: impl Read + Send + 'static,
    mut output: impl Write + Send + 'static,
) -> Result<Vec<String>> {
    let mut input = BufReader::new(input);
    let mut line = Vec::new();
    input
        .by_ref()
        .take(REQUEST_BYTES_MAX)
        .read_until(b'\n', &mut line)
        .map_err(Error::Stream)?;
    let request: PeerRequest = serde_json::from_slice(&line).map_err(|error| Error::Peer {
        reason: format!("what is asked makes no sense: {error}"),
    })?;
    let side = (server.sides)(request.kind);
    let allowed = server.check(&request);
    let answered = match (request.ask, allowed) {
        (PeerQuestion::Send(sending), Ok(())) => server.send(&*side, sending, output),
        (PeerQuestion::Receive(receiving), Ok(())) => return server.receive(&*side, receiving, input),
        (PeerQuestion::Send(_) | PeerQuestion::Receive(_), Err(error)) => Err(error.into()),
        (_, Err(error)) => write_answer(&mut output, Err::<(), _>(error)),
        (PeerQuestion::Abilities, _) => write_answer(&mut output, server.abilities(&*side)),
        (PeerQuestion::Datasets { name, is_tree }, _) => {
            let scope = if is_tree {
                ReplicaScope::Tree
            } else {
                ReplicaScope::Dataset
            };
            write_answer(&mut output, side.datasets(&name, scope))
        }
        (PeerQuestion::Estimate(sending), _) => write_answer(&mut output, side.estimate(&sending)),
        (PeerQuestion::Settle(receiving), _) => write_answer(&mut output, side.settle(&server.settled(receiving))),
        (PeerQuestion::Discard { dataset }, _) => write_answer(&mut output, side.discard(&dataset)),
        (PeerQuestion::Keep(keeping), _) => write_answer(&mut output, side.keep(&server.kept(keeping))),
    };
    answered.map(|()| Vec::new())
}

/// Decodes and checks a request of a hostile sender: only datasets at the root or below it may be accepted.
#[cfg(feature = "hostile")]
pub(crate) fn hostile_request(bytes: &[u8]) -> holdfast_block::hostile::Outcome {
    use holdfast_block::hostile::Outcome;
    let Ok(request) = serde_json::from_slice::<PeerRequest>(bytes) else {
        return Outcome::Refused;
    };
    let server = PeerServer {
        sides: &|_| unreachable!("a check opens no side"),
        root: Some(Dataset {
            provider: ProviderKind::Zfs,
            name: "tank/b".to_owned(),
        }),
        clock: Arc::new(holdfast_block::SystemClock::new()),
    };
    if server.check(&request).is_ok() {
        assert_eq!(request.kind, ProviderKind::Zfs);
        assert!(!matches!(
            request.ask,
            PeerQuestion::Send(_) | PeerQuestion::Estimate(_)
        ));
        let named = request.ask.dataset().unwrap_or("tank/b");
        let parts = named.split('/').skip(2);
        assert!(named.starts_with("tank/b") && parts.clone().all(|part| !part.is_empty() && !part.starts_with('.')));
    }
    Outcome::Decoded
}

fn write_answer<T: Serialize>(output: &mut impl Write, answer: ProviderResult<T>) -> Result<()> {
    let answer = match answer.map(|value| serde_json::to_value(value)) {
        Ok(Ok(value)) => PeerAnswer::Done(value),
        Ok(Err(error)) => {
            return Err(Error::Peer {
                reason: error.to_string(),
            });
        }
        Err(error) => PeerAnswer::Refused(PeerRefusal::from(&error)),
    };
    let mut line = serde_json::to_vec(&answer).map_err(|error| Error::Peer {
        reason: error.to_string(),
    })?;
    line.push(b'\n');
    output
        .write_all(&line)
        .and_then(|()| output.flush())
        .map_err(Error::Stdout)
}

impl PeerServer<'_> {
    fn abilities(&self, side: &dyn ReplicaSide) -> ProviderResult<ReplicaAbilities> {
        let mut abilities = side.abilities()?;
        abilities.sends_intermediates &= self.root.is_none();
        Ok(abilities)
    }

    /// Checks that the request is allowed.
    fn check(&self, request: &PeerRequest) -> ProviderResult<()> {
        let Some(root) = &self.root else { return Ok(()) };
        let refused = |what: &str, reason: &str| ProviderError::Refused {
            action: "do as asked with",
            what: what.to_owned(),
            reason: format!("{reason}: the key may add to {root}, and nothing else"),
        };
        let dataset = request.ask.dataset().unwrap_or(&root.name);
        match &request.ask {
            PeerQuestion::Estimate(_) | PeerQuestion::Send(_) => {
                return Err(refused(dataset, "nothing is sent from here"));
            }
            PeerQuestion::Keep(keeping) if keeping.method != KeepMethod::ReplaceHolds => {
                return Err(refused(dataset, "no bookmark and no second hold is made here"));
            }
            PeerQuestion::Keep(keeping) if !is_tag(&keeping.tag) => {
                return Err(refused(dataset, "the tag is not that of a replication"));
            }
            _ => {}
        }
        if request.kind != root.provider || !is_below(dataset, &root.name) || !is_plain(&dataset[root.name.len()..]) {
            return Err(refused(dataset, "it is elsewhere"));
        }
        if root.provider == ProviderKind::Btrfs && !is_reached_without_links(&root.name, dataset) {
            return Err(refused(dataset, "a link is on the way to it"));
        }
        Ok(())
    }

    fn send(
        &self,
        side: &dyn ReplicaSide,
        mut sending: SendRequest,
        output: impl Write + Send + 'static,
    ) -> Result<()> {
        let filter = match std::mem::replace(&mut sending.compression, StreamCompression::Never) {
            StreamCompression::Never => LinkFilter::None,
            StreamCompression::Adaptive => LinkFilter::CompressAdaptively,
            StreamCompression::Always => LinkFilter::Compress,
        };
        let mut sender = side.send(&sending)?;
        let from = sender.take_output().ok_or_else(missing_pipe)?;
        let transfer = self.options(filter).start(from, output).map_err(Error::Stream)?;
        while !transfer.is_over() {
            self.clock.sleep(LOOK_INTERVAL);
        }
        if let Some(failure) = transfer.failure() {
            return Err(Error::Peer { reason: failure });
        }
        loop {
            if let Some(ended) = sender.try_end().map_err(Error::Stream)? {
                if ended.is_success() {
                    return Ok(());
                }
                return Err(side.refusal("send", &sending.dataset, &ended.reason()).into());
            }
            self.clock.sleep(LOOK_INTERVAL);
        }
    }

    /// The request to compare with. The record of an append-only sender is ignored: it counts only if it was announced
    /// before the stream.
    fn settled(&self, mut receiving: ReceiveRequest) -> ReceiveRequest {
        if self.root.is_some() {
            receiving
                .snapshots
                .iter_mut()
                .for_each(|snapshot| snapshot.record = None);
        }
        receiving
    }

    /// The request to hold a snapshot. For an append-only sender, the tag is replaced by that of its root.
    fn kept(&self, mut keeping: KeepRequest) -> KeepRequest {
        if let Some(root) = &self.root {
            keeping.tag = format!("{REPLICA_TAG}in-{:016x}", fingerprint(&root.to_string()));
        }
        keeping
    }

    fn receive(
        &self,
        side: &dyn ReplicaSide,
        mut receiving: ReceiveRequest,
        input: impl Read + Send + 'static,
    ) -> Result<Vec<String>> {
        let is_compressed = std::mem::replace(&mut receiving.is_compressed, false);
        let filter = if is_compressed {
            LinkFilter::Decompress
        } else {
            LinkFilter::None
        };
        let trust = match self.root {
            None => SenderTrust::Full,
            Some(_) => SenderTrust::AddOnly,
        };
        let mut receiver = side.receive(&receiving, trust)?;
        let (to, check) = receiver.take_input().ok_or_else(missing_pipe)?;
        let transfer = self
            .options(filter)
            .start_into(input, to, check)
            .map_err(Error::Stream)?;
        let ended = loop {
            if let Some(ended) = receiver.try_end().map_err(Error::Stream)? {
                break ended;
            }
            self.clock.sleep(LOOK_INTERVAL);
        };
        received(&transfer, side, &receiving.dataset, &ended)?;
        Ok(receiver.finish()?)
    }

    fn options(&self, filter: LinkFilter) -> TransferOptions {
        TransferOptions {
            filter,
            limit: None,
            clock: Arc::clone(&self.clock),
        }
    }
}

fn missing_pipe() -> Error {
    Error::Peer {
        reason: "a program has no ends".to_owned(),
    }
}

fn received(transfer: &Transfer, side: &dyn ReplicaSide, dataset: &str, ended: &holdfast_host::PipedEnd) -> Result<()> {
    if let Some(refusal) = transfer.refusal() {
        let error = ProviderError::Refused {
            action: "receive",
            what: dataset.to_owned(),
            reason: refusal,
        };
        return Err(error.into());
    }
    if ended.is_success() {
        return Ok(());
    }
    // After a broken pipe, the receiver's error names the cause.
    let failure = transfer.failure().filter(|failure| !failure.contains("roken pipe"));
    match failure {
        Some(failure) => Err(Error::Peer {
            reason: format!("{failure}; {}", ended.reason()),
        }),
        None => Err(side.refusal("receive", dataset, &ended.reason()).into()),
    }
}

/// Whether `holdfast` could have created this tag for a replication.
fn is_tag(tag: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
    tag.strip_prefix(REPLICA_TAG)
        .is_some_and(|rest| rest.bytes().all(is_plain))
}

/// Whether `name`, the part below the root, has only characters without a special meaning.
fn is_plain(name: &str) -> bool {
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"_.: -".contains(&byte);
    let part = |part: &str| !part.is_empty() && part.bytes().all(is_allowed) && !part.starts_with(['.', '-', ' ']);
    name.is_empty() || name.strip_prefix('/').is_some_and(|below| below.split('/').all(part))
}

/// Received files may contain links, and a name may refer to a path through them.
fn is_reached_without_links(root: &str, dataset: &str) -> bool {
    let below = dataset.strip_prefix(root).unwrap_or_default();
    let mut path = Path::new(root).to_owned();
    below.split('/').filter(|part| !part.is_empty()).all(|part| {
        path.push(part);
        match path.symlink_metadata() {
            Ok(found) => found.is_dir(),
            Err(error) => error.kind() == io::ErrorKind::NotFound,
        }
    })
}

#[cfg(test)]
mod tests;
