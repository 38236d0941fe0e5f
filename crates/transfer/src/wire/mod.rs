//! The messages of both sides as bytes. docs/format/transfer.md describes them byte by byte.
//!
//! Everything that is decoded here was written by a stranger: lengths are checked before they are used, and memory is
//! taken only for bytes that have arrived.

mod capability;
mod compression;
mod control;
mod field;
mod frame;
mod greeting;
mod message;
mod range;

pub use capability::Capabilities;
pub use compression::{RangeCompressor, RangeDecompressor};
pub use control::{
    Barrier, ErrorCode, LastPass, Ownership, PeerError, ReceiverTimes, RoundEnd, STREAM_COUNT_MAX, Seal,
    UnitComparison, UnitHash, UnitVerdict,
};
pub(crate) use field::{FieldReader, FieldWriter};
pub(crate) use frame::window_bytes_of;
pub use frame::{FRAME_OVERHEAD_BYTES, Frame, FrameDecoder, PAYLOAD_BYTES_MAX};
pub use greeting::{Accept, DiskId, HeldUnits, Hello, Offer, PROTOCOL_VERSION, ReceiverId, SessionId, VersionRange};
pub use message::Message;
pub use range::{CompressedRange, RangeContent, RangeFrame};
