//! What a copy is asked for, and its report.

use std::sync::Arc;
use std::time::Duration;

use holdfast_block::Clock;
use holdfast_transfer::{
    ConvergenceOptions, CopyPurpose, DiskId, Forecast, FreezeTrigger, HandoverNote, HandoverReport, SenderState,
    SenderWarning, SessionId, UnitLayout,
};

use super::director::CopyDirector;
use crate::connect::Connector;
use crate::phases::PhaseTime;
use crate::request::ReceiveRequest;
use crate::send_rate::SendRate;
use crate::source::LiveSource;

/// A copy of a disk.
pub struct LiveCopyRequest<'a> {
    /// The disk.
    pub source: &'a dyn LiveSource,
    /// How it is divided.
    pub layout: UnitLayout,
    /// Where the receiver is.
    pub connector: Arc<dyn Connector>,
    /// What the receiver is to do.
    pub receive: ReceiveRequest,
    /// The same for each attempt to copy this disk to this target.
    pub session: SessionId,
    /// The disk, within the session.
    pub disk: DiskId,
    /// When the source is frozen.
    pub convergence: ConvergenceOptions,
    /// Whether the disk changes its owner.
    pub purpose: CopyPurpose,
    /// When the source is frozen. On request, the caller freezes it, and the freezer of the source only confirms that.
    pub trigger: FreezeTrigger,
    /// Whether data may be compressed.
    pub compression: CopyCompression,
    /// How fast it sends, together with other copies. There is no limit while the source is frozen.
    pub rate: Arc<SendRate>,
    /// Number of attempts to freeze.
    pub attempt_count_max: u32,
    /// For how long a lost connection is tried again.
    pub retry_time: Duration,
    /// The clock of all threads.
    pub clock: Arc<dyn Clock>,
    /// Randomness for the numbers of connections.
    pub randomness: &'a dyn holdfast_repo::key::Randomness,
    /// Name and version of the program.
    pub program: String,
    /// Sees rounds and warnings as they come.
    pub observer: &'a dyn CopyObserver,
    /// Through which the caller directs the copy; none if it runs by itself.
    pub director: Option<&'a CopyDirector>,
}

/// Whether data is compressed on its way to another host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CopyCompression {
    /// While the connection is slower than the compression, and if the data becomes smaller.
    Adaptive,
    /// Never.
    Off,
}

/// Sees what happens.
pub trait CopyObserver: Sync {
    /// A round has ended.
    fn round(&self, forecast: &Forecast);
    /// The source was frozen for too long, and was thawed; or another event that a user should know.
    fn warning(&self, warning: CopyWarning);
    /// The state has changed.
    fn state(&self, _state: SenderState) {}
    /// The receiver has sealed the disk: it can be handed over ([`CopyDirector::confirm_handover`]).
    fn sealed(&self, _note: HandoverNote) {}
    /// The receiver owns the disk. Returns when the caller knows how the handover of the machine has ended: if it has
    /// failed, the receiver is not told to forget the copy.
    fn handed_over(&self) -> MachineHandover {
        MachineHandover::Completed
    }
}

/// How the handover of the machine has ended to which a disk belongs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MachineHandover {
    /// It runs at the receiver.
    Completed,
    /// It runs at the sender.
    Failed,
}

/// What a user should know.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CopyWarning {
    /// Of the protocol.
    Protocol(SenderWarning),
    /// The connection was lost, and is made again.
    ConnectionLost {
        /// The reason of the other side, if it gave one.
        reason: Option<String>,
    },
    /// The source could not be frozen.
    NotFrozen {
        /// Why.
        reason: String,
    },
    /// The source writes too fast, and cannot be slowed down.
    NotThrottled,
}

/// The result of a copy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LiveCopyReport {
    /// The frozen time with its parts.
    pub handover: HandoverReport,
    /// How long each phase took, in order.
    pub phases: Vec<PhaseTime>,
    /// The rounds.
    pub rounds: Vec<Forecast>,
    /// Bytes of the disk.
    pub size_bytes: u64,
    /// Bytes of frames that were sent.
    pub sent_bytes: u64,
    /// What they would have without compression.
    pub plain_bytes: u64,
    /// Bytes that were read as zeroes or holes, and not sent.
    pub zero_bytes: u64,
    /// Number of connections that were lost.
    pub lost_connection_count: u32,
    /// How long it took.
    pub duration: Duration,
    /// Whether an earlier attempt had completed the copy already.
    pub was_complete: bool,
}

/// The session of a copy that these facts determine: of the source, and of the target.
pub fn session_of(facts: &[&[u8]]) -> SessionId {
    let mut hasher = blake3::Hasher::new();
    for fact in facts {
        hasher.update(&(fact.len() as u64).to_le_bytes());
        hasher.update(fact);
    }
    let mut session = [0; 16];
    hasher.finalize_xof().fill(&mut session);
    SessionId(session)
}
