//! The commands that the client sends.

use holdfast_block::{Request, RequestKind};

use crate::nbd::wire::{CommandFlags, CommandKind};

/// A command for the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ClientCommand {
    pub(super) kind: CommandKind,
    pub(super) flags: CommandFlags,
    /// The caller's request, with offset and length.
    pub(super) request: Request,
}

impl ClientCommand {
    pub(super) fn of(request: Request) -> Self {
        let kind = match request.kind {
            RequestKind::Read => CommandKind::READ,
            RequestKind::Write => CommandKind::WRITE,
            RequestKind::WriteZeroes => CommandKind::WRITE_ZEROES,
            RequestKind::Trim => CommandKind::TRIM,
            RequestKind::Flush => CommandKind::FLUSH,
            RequestKind::Extents => CommandKind::BLOCK_STATUS,
        };
        Self {
            kind,
            flags: CommandFlags::default(),
            request,
        }
    }

    /// A command to write zeroes that fails if it would be as slow as writing data.
    pub(super) fn fast_zero(mut request: Request) -> Self {
        request.kind = RequestKind::WriteZeroes;
        let mut command = Self::of(request);
        command.flags = CommandFlags::FAST_ZERO;
        command
    }

    /// Bytes of data sent or received.
    pub(super) fn payload_bytes(&self) -> u64 {
        match self.kind {
            CommandKind::READ | CommandKind::WRITE => self.request.length,
            _ => 0,
        }
    }

    /// Name for messages.
    pub(super) fn name(&self) -> &'static str {
        match self.kind {
            CommandKind::READ => "read",
            CommandKind::WRITE => "write",
            CommandKind::WRITE_ZEROES => "write of zeroes",
            CommandKind::TRIM => "trim",
            CommandKind::FLUSH => "flush",
            _ => "block status query",
        }
    }
}
