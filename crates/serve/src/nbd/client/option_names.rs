//! Names of options of the handshake, and of the reasons for refusing them.

use crate::nbd::wire::{OptionKind, OptionReplyKind};

/// The protocol's name of an option.
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

/// The meaning of an error.
pub(super) fn reason_of(kind: OptionReplyKind) -> &'static str {
    match kind {
        OptionReplyKind::ERR_UNSUP => "it does not support it",
        OptionReplyKind::ERR_POLICY => "it is forbidden",
        OptionReplyKind::ERR_INVALID => "it considers it invalid",
        OptionReplyKind::ERR_PLATFORM => "its platform does not support it",
        OptionReplyKind::ERR_UNKNOWN => "there is no such export",
        OptionReplyKind::ERR_SHUTDOWN => "it is shutting down",
        OptionReplyKind::ERR_BLOCK_SIZE_REQD => "it requires a request for block sizes",
        OptionReplyKind::ERR_TOO_BIG => "it is too large",
        OptionReplyKind::ERR_EXT_HEADER_REQD => "it requires extended headers",
        _ => "an unknown error",
    }
}
