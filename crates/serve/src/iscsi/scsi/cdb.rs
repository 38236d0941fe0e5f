//! Command descriptor blocks, and the table of commands that logical units know.

/// Bytes of a command descriptor block; shorter ones are padded with zeros.
pub(crate) const CDB_BYTES: usize = 16;

/// A command descriptor block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Cdb(pub(crate) [u8; CDB_BYTES]);

impl Cdb {
    pub(crate) fn byte(&self, at: usize) -> u8 {
        self.0.get(at).copied().unwrap_or(0)
    }

    fn field<const N: usize>(&self, at: usize) -> [u8; N] {
        let bytes = self.0.get(at..).and_then(<[u8]>::first_chunk);
        bytes.copied().unwrap_or([0; N])
    }

    pub(crate) fn u16(&self, at: usize) -> u16 {
        u16::from_be_bytes(self.field(at))
    }

    pub(crate) fn u32(&self, at: usize) -> u32 {
        u32::from_be_bytes(self.field(at))
    }

    pub(crate) fn u64(&self, at: usize) -> u64 {
        u64::from_be_bytes(self.field(at))
    }

    /// Block address and number of blocks of a command for blocks, whose form depends on its length.
    pub(crate) fn blocks(&self) -> BlockSpan {
        match self.byte(0) >> 5 {
            0 => {
                let first = u64::from(self.u32(0) & 0x001f_ffff);
                let count = u64::from(self.byte(4));
                // "A TRANSFER LENGTH field set to zero specifies that 256 logical blocks shall be read."
                let count = if count == 0 { 256 } else { count };
                BlockSpan { first, count }
            }
            1 | 2 => BlockSpan {
                first: u64::from(self.u32(2)),
                count: u64::from(self.u16(7)),
            },
            5 => BlockSpan {
                first: u64::from(self.u32(2)),
                count: u64::from(self.u32(6)),
            },
            _ => BlockSpan {
                first: self.u64(2),
                count: u64::from(self.u32(10)),
            },
        }
    }
}

/// Blocks that a command addresses, not yet checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BlockSpan {
    pub(crate) first: u64,
    pub(crate) count: u64,
}

/// A command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Command {
    TestUnitReady,
    RequestSense,
    Inquiry,
    ModeSelect,
    ModeSense,
    Reserve,
    Release,
    StartStopUnit,
    PreventAllow,
    ReadCapacity10,
    ReadCapacity16,
    Read,
    Write,
    WriteAndVerify,
    Verify,
    Prefetch,
    SynchronizeCache,
    WriteSame,
    Unmap,
    PersistentReserveIn,
    PersistentReserveOut,
    CompareAndWrite,
    OrWrite,
    GetLbaStatus,
    ReportLuns,
    ReportOperationCodes,
    ReportTaskManagement,
}

/// Whether a command conflicts with reservations of other initiators (SPC-4 table 66, SPC-2 table 10).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReservationClass {
    /// Always allowed.
    Free,
    /// Allowed with persistent reservations, not with RESERVE.
    Persistent,
    /// Allowed unless reading is reserved.
    Read,
    /// Allowed for holders and registrants only.
    Change,
}

/// A row of the table of commands.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CommandInfo {
    pub(crate) command: Command,
    /// Whether the service action tells commands with this operation code apart.
    pub(crate) service_action: Option<u8>,
    pub(crate) class: ReservationClass,
    /// The bits of the CDB that are evaluated, beginning with the operation code.
    pub(crate) usage: &'static [u8],
}

impl CommandInfo {
    pub(crate) fn opcode(&self) -> u8 {
        self.usage.first().copied().unwrap_or(0)
    }
}

const fn row(
    command: Command,
    service_action: Option<u8>,
    class: ReservationClass,
    usage: &'static [u8],
) -> CommandInfo {
    CommandInfo {
        command,
        service_action,
        class,
        usage,
    }
}

use Command as C;
use ReservationClass::{Change, Free, Persistent, Read};

/// All commands, by operation code.
#[rustfmt::skip]
pub(crate) const COMMANDS: &[CommandInfo] = &[
    row(C::TestUnitReady, None, Persistent, &[0x00, 0, 0, 0, 0, 0]),
    row(C::RequestSense, None, Free, &[0x03, 1, 0, 0, 0xff, 0]),
    row(C::Read, None, Read, &[0x08, 0x1f, 0xff, 0xff, 0xff, 0]),
    row(C::Write, None, Change, &[0x0a, 0x1f, 0xff, 0xff, 0xff, 0]),
    row(C::Inquiry, None, Free, &[0x12, 1, 0xff, 0xff, 0xff, 0]),
    row(C::ModeSelect, None, Change, &[0x15, 0x11, 0, 0, 0xff, 0]),
    row(C::Reserve, None, Change, &[0x16, 0, 0, 0, 0, 0]),
    row(C::Release, None, Free, &[0x17, 0, 0, 0, 0, 0]),
    row(C::ModeSense, None, Change, &[0x1a, 0x08, 0xff, 0xff, 0xff, 0]),
    row(C::StartStopUnit, None, Change, &[0x1b, 1, 0, 0x0f, 0xf7, 0]),
    row(C::PreventAllow, None, Change, &[0x1e, 0, 0, 0, 3, 0]),
    row(C::ReadCapacity10, None, Free, &[0x25, 0, 0xff, 0xff, 0xff, 0xff, 0, 0, 1, 0]),
    row(C::Read, None, Read, &[0x28, 0xf8, 0xff, 0xff, 0xff, 0xff, 0x1f, 0xff, 0xff, 0]),
    row(C::Write, None, Change, &[0x2a, 0xf8, 0xff, 0xff, 0xff, 0xff, 0x1f, 0xff, 0xff, 0]),
    row(C::WriteAndVerify, None, Change, &[0x2e, 0xf6, 0xff, 0xff, 0xff, 0xff, 0x1f, 0xff, 0xff, 0]),
    row(C::Verify, None, Read, &[0x2f, 0xf6, 0xff, 0xff, 0xff, 0xff, 0x1f, 0xff, 0xff, 0]),
    row(C::Prefetch, None, Read, &[0x34, 2, 0xff, 0xff, 0xff, 0xff, 0x1f, 0xff, 0xff, 0]),
    row(C::SynchronizeCache, None, Change, &[0x35, 2, 0xff, 0xff, 0xff, 0xff, 0x1f, 0xff, 0xff, 0]),
    row(C::WriteSame, None, Change, &[0x41, 0xf8, 0xff, 0xff, 0xff, 0xff, 0x1f, 0xff, 0xff, 0]),
    row(C::Unmap, None, Change, &[0x42, 1, 0, 0, 0, 0, 0x1f, 0xff, 0xff, 0]),
    row(C::ModeSelect, None, Change, &[0x55, 0x11, 0, 0, 0, 0, 0, 0xff, 0xff, 0]),
    row(C::ModeSense, None, Change, &[0x5a, 0x18, 0xff, 0xff, 0, 0, 0, 0xff, 0xff, 0]),
    row(C::PersistentReserveIn, Some(0), Persistent, &[0x5e, 0x1f, 0, 0, 0, 0, 0, 0xff, 0xff, 0]),
    row(C::PersistentReserveIn, Some(1), Persistent, &[0x5e, 0x1f, 0, 0, 0, 0, 0, 0xff, 0xff, 0]),
    row(C::PersistentReserveIn, Some(2), Persistent, &[0x5e, 0x1f, 0, 0, 0, 0, 0, 0xff, 0xff, 0]),
    row(C::PersistentReserveIn, Some(3), Persistent, &[0x5e, 0x1f, 0, 0, 0, 0, 0, 0xff, 0xff, 0]),
    row(C::PersistentReserveOut, Some(0), Persistent, &[0x5f, 0x1f, 0xff, 0, 0, 0xff, 0xff, 0xff, 0xff, 0]),
    row(C::PersistentReserveOut, Some(1), Persistent, &[0x5f, 0x1f, 0xff, 0, 0, 0xff, 0xff, 0xff, 0xff, 0]),
    row(C::PersistentReserveOut, Some(2), Persistent, &[0x5f, 0x1f, 0xff, 0, 0, 0xff, 0xff, 0xff, 0xff, 0]),
    row(C::PersistentReserveOut, Some(3), Persistent, &[0x5f, 0x1f, 0xff, 0, 0, 0xff, 0xff, 0xff, 0xff, 0]),
    row(C::PersistentReserveOut, Some(4), Persistent, &[0x5f, 0x1f, 0xff, 0, 0, 0xff, 0xff, 0xff, 0xff, 0]),
    row(C::PersistentReserveOut, Some(5), Persistent, &[0x5f, 0x1f, 0xff, 0, 0, 0xff, 0xff, 0xff, 0xff, 0]),
    row(C::PersistentReserveOut, Some(6), Persistent, &[0x5f, 0x1f, 0xff, 0, 0, 0xff, 0xff, 0xff, 0xff, 0]),
    row(C::Read, None, Read, &[0x88, 0xf8, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x1f, 0]),
    row(C::CompareAndWrite, None, Change, &[0x89, 0xf8, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0xff, 0x1f, 0]),
    row(C::Write, None, Change, &[0x8a, 0xf8, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x1f, 0]),
    row(C::OrWrite, None, Change, &[0x8b, 0xf8, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x1f, 0]),
    row(C::WriteAndVerify, None, Change, &[0x8e, 0xf6, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x1f, 0]),
    row(C::Verify, None, Read, &[0x8f, 0xf6, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x1f, 0]),
    row(C::Prefetch, None, Read, &[0x90, 2, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x1f, 0]),
    row(C::SynchronizeCache, None, Change, &[0x91, 2, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x1f, 0]),
    row(C::WriteSame, None, Change, &[0x93, 0xf9, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x1f, 0]),
    row(C::ReadCapacity16, Some(0x10), Free, &[0x9e, 0x1f, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1, 0]),
    row(C::GetLbaStatus, Some(0x12), Read, &[0x9e, 0x1f, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0, 0]),
    row(C::ReportLuns, None, Free, &[0xa0, 0, 0xff, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 0, 0]),
    row(C::ReportOperationCodes, Some(0x0c), Free, &[0xa3, 0x1f, 0x87, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0, 0]),
    row(C::ReportTaskManagement, Some(0x0d), Free, &[0xa3, 0x1f, 0x80, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 0, 0]),
    row(C::Read, None, Read, &[0xa8, 0xf8, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x1f, 0]),
    row(C::Write, None, Change, &[0xaa, 0xf8, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x1f, 0]),
    row(C::WriteAndVerify, None, Change, &[0xae, 0xf6, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x1f, 0]),
    row(C::Verify, None, Read, &[0xaf, 0xf6, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x1f, 0]),
];

/// The row of a command, or whether at least its operation code is known.
pub(crate) enum Lookup {
    Found(&'static CommandInfo),
    UnknownServiceAction,
    UnknownOperationCode,
}

/// Finds the command of a CDB.
pub(crate) fn lookup(opcode: u8, service_action: u8) -> Lookup {
    let mut rows = COMMANDS.iter().filter(|row| row.opcode() == opcode).peekable();
    if rows.peek().is_none() {
        return Lookup::UnknownOperationCode;
    }
    let is_it = |row: &&CommandInfo| row.service_action.is_none_or(|action| action == service_action);
    rows.find(is_it).map_or(Lookup::UnknownServiceAction, Lookup::Found)
}

#[cfg(test)]
mod tests {
    use super::{BlockSpan, COMMANDS, Cdb};

    #[test]
    fn every_usage_map_has_the_length_of_its_command() {
        for row in COMMANDS {
            let expected = match row.opcode() >> 5 {
                0 => 6,
                1 | 2 => 10,
                5 => 12,
                _ => 16,
            };
            assert_eq!(row.usage.len(), expected, "{:#x}", row.opcode());
        }
        assert!(COMMANDS.is_sorted_by_key(|row| (row.opcode(), row.service_action)));
    }

    #[test]
    fn blocks_are_decoded_in_every_form() {
        let blocks = |bytes: &[u8]| {
            let mut cdb = [0; 16];
            cdb[..bytes.len()].copy_from_slice(bytes);
            let BlockSpan { first, count } = Cdb(cdb).blocks();
            (first, count)
        };
        assert_eq!(blocks(&[0x08, 0xff, 2, 3, 4]), (0x1f_0203, 4));
        assert_eq!(blocks(&[0x08, 0, 0, 1, 0]), (1, 256));
        assert_eq!(blocks(&[0x28, 0, 1, 2, 3, 4, 0, 5, 6]), (0x0102_0304, 0x0506));
        assert_eq!(blocks(&[0xa8, 0, 1, 2, 3, 4, 5, 6, 7, 8]), (0x0102_0304, 0x0506_0708));
        assert_eq!(
            blocks(&[0x88, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]),
            (0x0102_0304_0506_0708, 0x090a_0b0c)
        );
    }
}
