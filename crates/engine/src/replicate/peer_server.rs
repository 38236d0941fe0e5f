//! The side that is asked: `holdfast peer`, and `holdfast receive --append-only`.
//!
//! To one that may only add, nothing is promised that a hostile sender could turn against what is there: he names datasets below his
//! root and nothing else, streams bring one snapshot each, without properties, and are unpacked and looked at before ZFS sees them; what
//! he holds he holds in our name; what is noted stays noted. There is no word for removing, rolling back or renaming.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::path::Path;
use std::sync::Arc;

use holdfast_block::Clock;
use holdfast_host::changed_blocks::{FIRST_RECORD_BYTES, brings_one_snapshot};
use holdfast_host::provider::{
    Dataset, KeepingMeans, PackWhen, ProviderError, ProviderKind, ProviderResult, Receiving, ReplicaAbilities,
    ReplicaSide, Sending,
};
use serde::Serialize;

use super::carry::{Carriage, Carrying, Packing};
use super::is_below;
use super::peer::{Answer, Ask, Refusal, Request};
use crate::error::{Error, Result};

/// Bytes of a request, at most: what comes with a stream of thousands of snapshots.
const REQUEST_BYTES_MAX: u64 = 32 << 20;
/// How often it is looked whether a stream has ended.
const LOOK_INTERVAL: std::time::Duration = std::time::Duration::from_millis(3);

/// Who answers.
pub struct PeerServer<'a> {
    /// The sides of this host.
    pub sides: &'a dyn Fn(ProviderKind) -> Box<dyn ReplicaSide>,
    /// The dataset to which, and below which, may be added, and nothing else; none where all may be asked.
    pub root: Option<Dataset>,
    /// The clock of all threads.
    pub clock: Arc<dyn Clock>,
}

/// Answers one request, which is the first line of `input`.
///
/// # Errors
/// It makes no sense, is refused, or a stream does not come to its end.
pub fn serve_peer(
    server: &PeerServer<'_>,
    input: impl Read + Send + 'static,
    mut output: impl Write + Send + 'static,
) -> Result<()> {
    let mut input = BufReader::new(input);
    let mut line = Vec::new();
    input
        .by_ref()
        .take(REQUEST_BYTES_MAX)
        .read_until(b'\n', &mut line)
        .map_err(Error::Stream)?;
    let request: Request = serde_json::from_slice(&line).map_err(|error| Error::Peer {
        reason: format!("what is asked makes no sense: {error}"),
    })?;
    let side = (server.sides)(request.kind);
    let allowed = server.check(&request);
    match (request.ask, allowed) {
        (Ask::Send(sending), Ok(())) => server.send(&*side, sending, output),
        (Ask::Receive(receiving), Ok(())) => server.receive(&*side, receiving, input),
        (Ask::Send(_) | Ask::Receive(_), Err(error)) => Err(error.into()),
        (_, Err(error)) => tell(&mut output, Err::<(), _>(error)),
        (Ask::Abilities, _) => tell(&mut output, server.abilities(&*side)),
        (Ask::Datasets { name, is_tree }, _) => tell(&mut output, side.datasets(&name, is_tree)),
        (Ask::Estimate(sending), _) => tell(&mut output, side.estimate(&sending)),
        (Ask::Settle(receiving), _) => tell(&mut output, side.settle(&receiving)),
        (Ask::Discard { dataset }, _) => tell(&mut output, side.discard(&dataset)),
        (Ask::Keep(keeping), _) => tell(&mut output, side.keep(&keeping)),
    }
}

/// A request as a hostile sender writes it: what may be asked is at the root, or below it.
#[cfg(feature = "hostile")]
pub(crate) fn hostile_request(bytes: &[u8]) -> holdfast_block::hostile::Outcome {
    use holdfast_block::hostile::Outcome;
    let Ok(request) = serde_json::from_slice::<Request>(bytes) else {
        return Outcome::Refused;
    };
    let server = PeerServer {
        sides: &|_| unreachable!("nobody is asked"),
        root: Some(Dataset {
            provider: ProviderKind::Zfs,
            name: "tank/b".to_owned(),
        }),
        clock: Arc::new(holdfast_block::SystemClock::new()),
    };
    if server.check(&request).is_ok() {
        assert_eq!(request.kind, ProviderKind::Zfs);
        assert!(!matches!(request.ask, Ask::Send(_) | Ask::Estimate(_)));
        let named = request.ask.dataset().unwrap_or("tank/b");
        let parts = named.split('/').skip(2);
        assert!(named.starts_with("tank/b") && parts.clone().all(|part| !part.is_empty() && !part.starts_with('.')));
    }
    Outcome::Decoded
}

fn tell<T: Serialize>(output: &mut impl Write, answer: ProviderResult<T>) -> Result<()> {
    let answer = match answer.map(|value| serde_json::to_value(value)) {
        Ok(Ok(value)) => Answer::Done(value),
        Ok(Err(error)) => {
            return Err(Error::Peer {
                reason: error.to_string(),
            });
        }
        Err(error) => Answer::Refused(Refusal::from(&error)),
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
        abilities.joins &= self.root.is_none();
        Ok(abilities)
    }

    /// Whether it may be asked.
    fn check(&self, request: &Request) -> ProviderResult<()> {
        let Some(root) = &self.root else { return Ok(()) };
        let refused = |what: &str, reason: &str| ProviderError::Refused {
            action: "do as asked with",
            what: what.to_owned(),
            reason: format!("{reason}: the key may add to {root}, and nothing else"),
        };
        let dataset = request.ask.dataset().unwrap_or(&root.name);
        match &request.ask {
            Ask::Estimate(_) | Ask::Send(_) => return Err(refused(dataset, "nothing is sent from here")),
            Ask::Keep(keeping) if keeping.means == KeepingMeans::Bookmark => {
                return Err(refused(dataset, "no bookmark is made here"));
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

    fn send(&self, side: &dyn ReplicaSide, mut sending: Sending, output: impl Write + Send + 'static) -> Result<()> {
        let packing = match std::mem::replace(&mut sending.packing, PackWhen::Never) {
            PackWhen::Never => Packing::Leave,
            PackWhen::WhereSlow => Packing::WhereSlow,
            PackWhen::Always => Packing::Always,
        };
        let mut sender = side.send(&sending)?;
        let from = sender.take_output().ok_or_else(no_ends)?;
        let carrying = self.carriage(packing).start(from, output).map_err(Error::Stream)?;
        while !carrying.is_over() {
            self.clock.sleep(LOOK_INTERVAL);
        }
        if let Some(failure) = carrying.failure() {
            return Err(Error::Peer { reason: failure });
        }
        loop {
            if let Some(ended) = sender.try_end().map_err(Error::Stream)? {
                if ended.is_well() {
                    return Ok(());
                }
                return Err(side.refusal("send", &sending.dataset, &ended.reason()).into());
            }
            self.clock.sleep(LOOK_INTERVAL);
        }
    }

    fn receive(
        &self,
        side: &dyn ReplicaSide,
        mut receiving: Receiving,
        input: impl Read + Send + 'static,
    ) -> Result<()> {
        let is_packed = std::mem::replace(&mut receiving.is_packed, false);
        let packing = if is_packed { Packing::Unpack } else { Packing::Leave };
        let mut receiver = side.receive(&receiving)?;
        let to = receiver.take_input().ok_or_else(no_ends)?;
        let to = Looked {
            to,
            first: Vec::new(),
            is_good: self.root.is_none() || side.kind() != ProviderKind::Zfs,
        };
        let carrying = self.carriage(packing).start(input, to).map_err(Error::Stream)?;
        let ended = loop {
            if let Some(ended) = receiver.try_end().map_err(Error::Stream)? {
                break ended;
            }
            self.clock.sleep(LOOK_INTERVAL);
        };
        received(&carrying, side, &receiving.dataset, &ended)?;
        // Whoever has sent need not ask for it: nobody mounts what he has sent.
        receiving.snapshots.clear();
        Ok(side.settle(&receiving)?)
    }

    fn carriage(&self, packing: Packing) -> Carriage {
        Carriage {
            packing,
            limit: None,
            clock: Arc::clone(&self.clock),
        }
    }
}

fn no_ends() -> Error {
    Error::Peer {
        reason: "a program has no ends".to_owned(),
    }
}

fn received(carrying: &Carrying, side: &dyn ReplicaSide, dataset: &str, ended: &holdfast_host::PipedEnd) -> Result<()> {
    if ended.is_well() {
        return Ok(());
    }
    // A broken pipe says what has happened to the receiver, who knows better.
    let failure = carrying.failure().filter(|failure| !failure.contains("roken pipe"));
    match failure {
        Some(failure) => Err(Error::Peer {
            reason: format!("{failure}; {}", ended.reason()),
        }),
        None => Err(side.refusal("receive", dataset, &ended.reason()).into()),
    }
}

/// The first record of a stream is looked at before anything of it goes on.
struct Looked<W> {
    to: W,
    first: Vec<u8>,
    is_good: bool,
}

impl<W: Write> Write for Looked<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.is_good {
            return self.to.write(bytes);
        }
        let wanted = (FIRST_RECORD_BYTES - self.first.len()).min(bytes.len());
        self.first.extend(&bytes[..wanted]);
        if let Ok(first) = <&[u8; FIRST_RECORD_BYTES]>::try_from(&self.first[..]) {
            if !brings_one_snapshot(first) {
                let reason = "the stream does not bring one snapshot alone, and is refused";
                return Err(io::Error::other(reason));
            }
            self.to.write_all(first)?;
            self.is_good = true;
        }
        Ok(wanted)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.to.flush()
    }
}

/// What stands below the root, without anything that has a meaning of its own.
fn is_plain(name: &str) -> bool {
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"_.: -".contains(&byte);
    let part = |part: &str| !part.is_empty() && part.bytes().all(is_allowed) && !part.starts_with(['.', '-', ' ']);
    name.is_empty() || name.strip_prefix('/').is_some_and(|below| below.split('/').all(part))
}

/// What was received may hold links, and a name may lead through them.
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
