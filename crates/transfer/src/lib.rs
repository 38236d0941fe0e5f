//! Live copies of disks between two hosts: the protocol, and both of its sides.
//!
//! A sender copies a disk while the guest writes to it, and sends again what was written meanwhile, until little is
//! left. Then it freezes the guest, sends the rest, and hands the disk over to the receiver. At every moment exactly
//! one side owns the disk, whatever fails.
//!
//! The crate has no input and output. [`Sender`] and [`Receiver`] are state machines: events in, actions out. The
//! caller owns sockets, files, the tracker of writes and the clock. A new connection continues an interrupted copy.

mod convergence;
mod digest;
mod error;
#[cfg(feature = "hostile")]
#[doc(hidden)]
pub mod hostile;
mod journal;
mod layout;
mod receiver;
mod sender;
mod traffic;
mod wire;

pub use convergence::{ConvergenceOptions, Forecast, RoundDecision, RoundMeasurement, ThrottlePolicy, Unconverged};
pub use digest::{Digest, UnitState};
pub use error::{Error, Result};
pub use journal::{CopyIdentity, JOURNAL_VERSION, JournalEntry, JournalState, SyncEntry};
pub use layout::{PriorContent, UnitLayout};
pub use receiver::{
    FileIdentity, LinkId, OperationId, Receiver, ReceiverAction, ReceiverEvent, ReceiverOptions, ReceiverState,
    StorageFailure,
};
pub use sender::{
    CopyPurpose, FirstPassTakes, FreezeTrigger, HandoverNote, HandoverReport, Outcome, Sender, SenderAction,
    SenderEvent, SenderOptions, SenderState, SenderWarning, TrackerCheck,
};
pub use traffic::{FrameBytes, LinkTraffic};
pub use wire::{
    Accept, Barrier, Capabilities, CompressedRange, DiskId, ErrorCode, FRAME_OVERHEAD_BYTES, Frame, FrameDecoder,
    HeldUnits, Hello, LastPass, Message, Offer, Ownership, PAYLOAD_BYTES_MAX, PROTOCOL_VERSION, PeerError,
    RangeCompressor, RangeContent, RangeDecompressor, RangeFrame, ReceiverId, ReceiverTimes, RoundEnd,
    STREAM_COUNT_MAX, Seal, SessionId, UnitComparison, UnitHash, UnitVerdict, VersionRange,
};
