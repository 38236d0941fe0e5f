//! The protocol between `holdfast` and a `holdfast` on another host, over ssh.
//!
//! A request is a line of JSON on the standard input of `holdfast peer 1`, one per process:
//! `{"kind":"zfs","ask":{...}}`. If a stream is to be received, it follows the line. The answer is a line of JSON on
//! standard output, or the requested stream. Exit code and standard error report success or failure.
//!
//! The answering side may be restricted so that this side can only add snapshots: see [`PeerServer`].

use std::sync::Arc;
use std::time::Duration;

use holdfast_block::Clock;
use holdfast_host::provider::{
    Incoming, KeepRequest, ProviderError, ProviderKind, ProviderResult, ReceiveRequest, ReplicaAbilities,
    ReplicaDataset, ReplicaScope, ReplicaSide, SendRequest, SenderTrust, StreamCompression,
};
use holdfast_host::{Piped, StreamTools, ToolError};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The version of the protocol.
pub const PEER_PROTOCOL: &str = "1";
/// The program that is started on the other host.
const PROGRAM: &str = "holdfast";

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct PeerRequest {
    pub(super) kind: ProviderKind,
    pub(super) ask: PeerQuestion,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
pub(super) enum PeerQuestion {
    Abilities,
    Datasets { name: String, is_tree: bool },
    Estimate(SendRequest),
    Send(SendRequest),
    Receive(ReceiveRequest),
    Settle(ReceiveRequest),
    Discard { dataset: String },
    Keep(KeepRequest),
}

impl PeerQuestion {
    /// The dataset that the request is about.
    pub(super) fn dataset(&self) -> Option<&str> {
        Some(match self {
            Self::Abilities => return None,
            Self::Datasets { name, .. } => name,
            Self::Estimate(sending) | Self::Send(sending) => &sending.dataset,
            Self::Receive(receiving) | Self::Settle(receiving) => &receiving.dataset,
            Self::Discard { dataset } => dataset,
            Self::Keep(keeping) => &keeping.dataset,
        })
    }
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
pub(super) enum PeerAnswer {
    Done(Value),
    Refused(PeerRefusal),
}

/// The reason for which a request was refused.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct PeerRefusal {
    pub(super) kind: PeerRefusalKind,
    pub(super) reason: String,
}

/// The kinds of refusals that a caller distinguishes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum PeerRefusalKind {
    NotThere,
    Held,
    Full,
    Other,
}

impl From<&ProviderError> for PeerRefusal {
    fn from(error: &ProviderError) -> Self {
        let kind = match error {
            ProviderError::NotFound { .. } => PeerRefusalKind::NotThere,
            ProviderError::Held { .. } => PeerRefusalKind::Held,
            ProviderError::Full { .. } => PeerRefusalKind::Full,
            _ => PeerRefusalKind::Other,
        };
        Self {
            kind,
            reason: error.to_string(),
        }
    }
}

/// A side of a replication on another host, where `holdfast` answers requests.
pub struct PeerSide {
    kind: ProviderKind,
    programs: Arc<dyn StreamTools>,
    host: String,
    clock: Arc<dyn Clock>,
    time_out: Duration,
}

impl PeerSide {
    /// The `holdfast` on `host`, reached by `programs`; `None` if none answers.
    pub fn find(
        kind: ProviderKind,
        programs: Arc<dyn StreamTools>,
        clock: Arc<dyn Clock>,
        time_out: Duration,
    ) -> ProviderResult<Option<Self>> {
        let peer = Self {
            kind,
            host: programs.host().unwrap_or_default().to_owned(),
            programs,
            clock,
            time_out,
        };
        match peer.abilities() {
            Ok(_) => Ok(Some(peer)),
            Err(ProviderError::Tool(ToolError::NotFound { .. })) => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn start(&self, ask: PeerQuestion) -> ProviderResult<Piped> {
        let request = PeerRequest { kind: self.kind, ask };
        let mut line = serde_json::to_vec(&request).map_err(|error| self.invalid_answer(&error.to_string()))?;
        line.push(b'\n');
        let mut piped = self.programs.start(PROGRAM, &["peer", PEER_PROTOCOL])?;
        // If the peer ends at once, its error is read later.
        piped.write_input(&line).ok();
        Ok(piped)
    }

    fn invalid_answer(&self, detail: &str) -> ProviderError {
        ProviderError::Invalid {
            program: PROGRAM,
            detail: format!("at {}: {detail}", self.host),
        }
    }

    fn ask<T: DeserializeOwned>(&self, action: &'static str, what: &str, ask: PeerQuestion) -> ProviderResult<T> {
        let (ended, output) = self.start(ask)?.answer(&*self.clock, self.time_out)?;
        let host = || self.host.clone();
        match ended.code {
            Some(127) => {
                return Err(ToolError::NotFound {
                    program: format!("{PROGRAM} at {}", self.host),
                }
                .into());
            }
            Some(255) => {
                return Err(ToolError::NoConnection {
                    host: host(),
                    reason: ended.reason(),
                }
                .into());
            }
            _ => {}
        }
        if output.is_empty() {
            // An older version does not know the request, or a shell has answered with any text.
            return Err(ProviderError::Refused {
                action,
                what: format!("{what} at {}", self.host),
                reason: ended.reason(),
            });
        }
        let answer: PeerAnswer =
            serde_json::from_slice(&output).map_err(|error| self.invalid_answer(&error.to_string()))?;
        match answer {
            PeerAnswer::Done(value) => {
                serde_json::from_value(value).map_err(|error| self.invalid_answer(&error.to_string()))
            }
            PeerAnswer::Refused(refusal) => {
                let what = format!("{what} at {}", self.host);
                let reason = refusal.reason;
                Err(match refusal.kind {
                    PeerRefusalKind::NotThere => ProviderError::NotFound { what },
                    PeerRefusalKind::Held => ProviderError::Held { what, reason },
                    PeerRefusalKind::Full => ProviderError::Full { action, what },
                    PeerRefusalKind::Other => ProviderError::Refused { action, what, reason },
                })
            }
        }
    }
}

impl ReplicaSide for PeerSide {
    fn kind(&self) -> ProviderKind {
        self.kind
    }

    fn host(&self) -> Option<&str> {
        Some(&self.host)
    }

    fn abilities(&self) -> ProviderResult<ReplicaAbilities> {
        self.ask("ask", "holdfast", PeerQuestion::Abilities)
    }

    fn datasets(&self, name: &str, scope: ReplicaScope) -> ProviderResult<Vec<ReplicaDataset>> {
        let ask = PeerQuestion::Datasets {
            name: name.to_owned(),
            is_tree: scope == ReplicaScope::Tree,
        };
        self.ask("look at", name, ask)
    }

    fn estimate(&self, sending: &SendRequest) -> ProviderResult<Option<u64>> {
        self.ask("send", &sending.dataset, PeerQuestion::Estimate(sending.clone()))
    }

    fn send(&self, sending: &SendRequest) -> ProviderResult<Piped> {
        let mut piped = self.start(PeerQuestion::Send(sending.clone()))?;
        drop(piped.take_input());
        Ok(piped)
    }

    fn receive(&self, receiving: &ReceiveRequest, _trust: SenderTrust) -> ProviderResult<Incoming> {
        let piped = self.start(PeerQuestion::Receive(receiving.clone()))?;
        Ok(Incoming::checked_elsewhere(piped))
    }

    fn settle(&self, receiving: &ReceiveRequest) -> ProviderResult<()> {
        self.ask("receive", &receiving.dataset, PeerQuestion::Settle(receiving.clone()))
    }

    fn discard(&self, dataset: &str) -> ProviderResult<()> {
        let ask = PeerQuestion::Discard {
            dataset: dataset.to_owned(),
        };
        self.ask("discard what was received in part of", dataset, ask)
    }

    fn keep(&self, keeping: &KeepRequest) -> ProviderResult<()> {
        self.ask("keep", &keeping.snapshot, PeerQuestion::Keep(keeping.clone()))
    }

    fn refusal(&self, action: &'static str, what: &str, stderr: &str) -> ProviderError {
        let what = format!("{what} at {}", self.host);
        // The program name and hints are for users of the other host.
        let parts = stderr.split("; ").filter(|part| !part.starts_with("hint: "));
        let parts: Vec<&str> = parts.map(|part| part.trim_start_matches("holdfast: ")).collect();
        let reason = parts.join("; ");
        if stderr.contains("no space is left") {
            return ProviderError::Full { action, what };
        }
        ProviderError::Refused { action, what, reason }
    }

    fn can_compress(&self, _compression: StreamCompression) -> bool {
        true
    }

    fn can_decompress(&self) -> bool {
        true
    }
}
