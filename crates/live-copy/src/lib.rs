//! Live copies: the disk of anything that writes to it meanwhile, to a file, a block device or another host.
//!
//! `holdfast_transfer` decides, as two state machines. This crate carries it out: threads, streams, files, and the
//! trackers of writes.
//!
//! - `source`: what is copied, and how its writes are tracked
//! - `freeze_commands`: commands of the user that freeze what writes
//! - `stream`, `link`: a byte stream, and its threads
//! - `send_rate`: a limit on what all streams send together
//! - `frame_queue`, `compression_gauge`: frames that wait to be written, and whether they are compressed meanwhile
//! - `seed`: similar content that the target has before
//! - `target`: the file, device or export that is written, with its journal
//! - `receive`, `connect`, `send`: the receiver, how it is started here or on another host, and the sender

mod compression_gauge;
mod connect;
mod error;
mod frame_queue;
mod freeze_commands;
mod link;
mod phases;
mod receive;
mod request;
mod seed;
mod send;
mod send_rate;
mod source;
mod stream;
mod target;
mod tracked_source;

pub use connect::{
    Connector, LocalConnector, ProgramConnector, RECEIVE_COMMAND, SeedObserver, SocketConnector, SocketOpener,
};
pub use error::{Error, Result};
pub use freeze_commands::{CommandFreezer, FreezeCommands, FreezeLauncher, serve_freeze_commands};
pub use phases::{CopyPhase, PhaseTime};
pub use receive::{ReceiveOutcome, ReceiveTools, TargetScope, serve_receiver};
pub use request::{ExistingTarget, InterruptedCopy, ReceiveRequest, RefusalKind, Seed, SeedProgress};
pub use send::{
    CopyCompression, CopyDirector, CopyObserver, CopyWarning, LiveCopyReport, LiveCopyRequest, MachineHandover,
    copy_live, session_of,
};
pub use send_rate::{LiftedRate, SendRate};
pub use source::{ComparedSource, Freezer, LiveSource, ReadContent, SourceConsistency, StillSource};
pub use stream::{ByteStream, StreamCloser};
pub use target::{
    ExportTarget, export_identity, interrupted_bytes, is_named_early, name_early, remove_early_name, remove_journal,
};
pub use tracked_source::{MachineFreezer, TrackedSource};

// What a caller needs to describe a copy, and to show its rounds.
pub use holdfast_transfer::{
    ConvergenceOptions, CopyPurpose, DiskId, Forecast, FreezeTrigger, HandoverNote, HandoverReport, PriorContent,
    RoundDecision, SenderState, SenderWarning, SessionId, ThrottlePolicy, Unconverged, UnitLayout,
};
