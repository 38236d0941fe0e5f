//! Options of the handshake, and why they are refused, in words.

use crate::nbd::wire::{OptionKind, OptionReplyKind};

/// The name that the protocol has for an option.
pub(super) fn name_of(option: OptionKind) -> &'static str {
    match option {
        OptionKind::LIST => "LIST",
        OptionKind::STARTTLS => "STARTTLS",
        OptionKind::INFO => "INFO",
        OptionKind::GO => "GO",
        OptionKind::STRUCTURED_REPLY => "STRUCTURED_REPLY",
        OptionKind::LIST_META_CONTEXT => "LIST_META_CONTEXT",
        OptionKind::SET_META_CONTEXT => "SET_META_CONTEXT",
        OptionKind::EXTENDED_HEADERS => "EXTENDED_HEADERS",
        _ => "an option",
    }
}

/// What an error means.
pub(super) fn reason_of(kind: OptionReplyKind) -> &'static str {
    match kind {
        OptionReplyKind::ERR_UNSUP => "it does not know it",
        OptionReplyKind::ERR_POLICY => "it is forbidden",
        OptionReplyKind::ERR_INVALID => "it calls it invalid",
        OptionReplyKind::ERR_PLATFORM => "its platform cannot do it",
        OptionReplyKind::ERR_UNKNOWN => "there is no such export",
        OptionReplyKind::ERR_SHUTDOWN => "it is shutting down",
        OptionReplyKind::ERR_BLOCK_SIZE_REQD => "it wants to be asked for block sizes",
        OptionReplyKind::ERR_TOO_BIG => "it is too much for it",
        OptionReplyKind::ERR_EXT_HEADER_REQD => "it wants extended headers",
        _ => "with an error that the protocol does not have",
    }
}
