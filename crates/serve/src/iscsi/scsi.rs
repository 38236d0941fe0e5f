//! SCSI: logical units and their commands (SAM-5, SPC-4, SBC-3), without any transport.
//!
//! [`execute`] takes a command descriptor block with its data, and returns status, sense data, and the data for the
//! initiator, on any thread.

mod blocks;
mod cdb;
mod inquiry;
mod mode;
mod provisioning;
mod reply;
mod report;
mod reservations;
mod sense;
mod unit;

use holdfast_block::Error as DeviceError;

use super::nexus::Nexus;
use blocks::{ByteCheck, DeviceFailure, Verification};
use cdb::{Lookup, lookup};
use mode::ModeUnit;
use reservations::ReserveOut;
use sense::Failure;

pub(crate) use blocks::read_failure;
pub(crate) use cdb::{Cdb, Command};
pub(crate) use inquiry::UnitPlace;
pub(crate) use reply::{CommandResult, DataIn};
pub(crate) use sense::{SENSE_BYTES, ScsiStatus, Sense};
pub(crate) use unit::{LUNS_CHANGED, TRANSFER_BYTES_MAX, UnitReset};
pub use unit::{LogicalUnit, SectorSize, UnitOptions};

/// "Mode parameters changed".
const MODE_CHANGED: u16 = 0x2a01;
/// Longest parameter list.
const PARAMETER_BYTES_MAX: u64 = 64 << 10;

/// A command with its data.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Invocation<'a> {
    pub(crate) nexus: &'a Nexus,
    /// The addressed unit; `None` if there is none with this number.
    pub(crate) unit: Option<&'a LogicalUnit>,
    pub(crate) place: UnitPlace<'a>,
    /// The numbers of the logical units of the target.
    pub(crate) unit_numbers: &'a [u8],
    pub(crate) cdb: &'a Cdb,
    /// The data from the initiator: as much as the command takes.
    pub(crate) data: &'a [u8],
    /// Number of bytes that the initiator offered.
    pub(crate) offered: u32,
}

/// The command of a CDB; `None` if it is unknown.
pub(crate) fn command_of(cdb: &Cdb) -> Option<Command> {
    match lookup(cdb.byte(0), cdb.byte(1) & 0x1f) {
        Lookup::Found(info) => Some(info.command),
        Lookup::UnknownServiceAction | Lookup::UnknownOperationCode => None,
    }
}

/// Number of bytes that a command takes from the initiator; 0 for an unknown command.
pub(crate) fn data_out_bytes(unit: Option<&LogicalUnit>, cdb: &Cdb) -> u64 {
    let (Some(unit), Some(command)) = (unit, command_of(cdb)) else {
        return 0;
    };
    let block_bytes = unit.block_bytes();
    let span = || cdb.blocks().count.saturating_mul(block_bytes);
    match command {
        Command::Write | Command::WriteAndVerify | Command::OrWrite => span(),
        Command::Verify => match ByteCheck::of(cdb) {
            Ok(ByteCheck::Data) => span(),
            Ok(ByteCheck::OneBlock) => block_bytes,
            Ok(ByteCheck::Medium) | Err(_) => 0,
        },
        Command::WriteSame if cdb.byte(0) == 0x93 && provisioning::is_without_data(cdb) => 0,
        Command::WriteSame => block_bytes,
        Command::CompareAndWrite => 2 * u64::from(cdb.byte(13)) * block_bytes,
        Command::ModeSelect if cdb.byte(0) == 0x15 => u64::from(cdb.byte(4)),
        Command::Unmap | Command::ModeSelect => u64::from(cdb.u16(7)),
        Command::PersistentReserveOut => u64::from(cdb.u32(5)),
        _ => 0,
    }
}

/// Whether a command will fail before it uses any data, so that none needs to be transferred.
pub(crate) fn fails_without_data(invocation: &Invocation<'_>) -> Option<CommandResult> {
    let is_data = |command: Command| {
        matches!(
            command,
            Command::Write | Command::WriteAndVerify | Command::OrWrite | Command::Verify | Command::CompareAndWrite
        )
    };
    let max = match command_of(invocation.cdb) {
        Some(command) if is_data(command) => TRANSFER_BYTES_MAX,
        _ => PARAMETER_BYTES_MAX,
    };
    if data_out_bytes(invocation.unit, invocation.cdb) > max {
        return Some(CommandResult::check(Sense::INVALID_FIELD_IN_CDB));
    }
    None
}

/// Number of bytes that a command reads from the device into the memory of the server.
pub(crate) fn data_in_bytes(unit: Option<&LogicalUnit>, cdb: &Cdb) -> u64 {
    match (unit, command_of(cdb)) {
        (Some(unit), Some(Command::Read)) => cdb
            .blocks()
            .count
            .saturating_mul(unit.block_bytes())
            .min(TRANSFER_BYTES_MAX),
        _ => 0,
    }
}

/// Executes a command. The second value is the error of the device, if it failed.
pub(crate) fn execute(invocation: &Invocation<'_>) -> (CommandResult, Option<DeviceError>) {
    match try_execute(invocation) {
        Ok(data) => (CommandResult::good(data), None),
        Err(DeviceFailure { failure, error }) => (failure.into(), error),
    }
}

fn try_execute(invocation: &Invocation<'_>) -> Result<DataIn, DeviceFailure> {
    let Invocation { nexus, unit, cdb, .. } = *invocation;
    let found = lookup(cdb.byte(0), cdb.byte(1) & 0x1f);
    // These three are answered even for numbers without a unit, and before unit attentions.
    if let Lookup::Found(info) = &found {
        match info.command {
            Command::Inquiry => return Ok(DataIn::Bytes(inquiry::inquiry(unit, invocation.place, cdb)?)),
            Command::ReportLuns => return Ok(DataIn::Bytes(report::luns(invocation.unit_numbers, cdb)?)),
            Command::RequestSense => return Ok(DataIn::Bytes(request_sense(invocation)?)),
            _ => {}
        }
    }
    let unit = unit.ok_or(Sense::UNIT_NOT_SUPPORTED)?;
    let info = match found {
        Lookup::Found(info) => info,
        Lookup::UnknownServiceAction => return Err(Sense::INVALID_FIELD_IN_CDB.into()),
        Lookup::UnknownOperationCode => return Err(Sense::INVALID_OPERATION_CODE.into()),
    };
    if let Some(attention) = unit.take_attention(nexus) {
        return Err(attention.into());
    }
    if unit.lock().reservations.conflicts(nexus, info.class) {
        return Err(Failure::Reserved.into());
    }
    dispatch(invocation, unit, info.command)
}

fn dispatch(invocation: &Invocation<'_>, unit: &LogicalUnit, command: Command) -> Result<DataIn, DeviceFailure> {
    let Invocation {
        nexus,
        cdb,
        data,
        offered,
        ..
    } = *invocation;
    // These commands would take a part of the data for another command's data.
    let is_exact = matches!(command, Command::CompareAndWrite | Command::WriteSame);
    if is_exact && u64::from(offered) != data_out_bytes(Some(unit), cdb) {
        return Err(Sense::INVALID_FIELD_IN_CDB.into());
    }
    let bytes = match command {
        Command::Read => return Ok(blocks::read(unit, cdb)?),
        Command::Write => done(blocks::write(unit, cdb, data, Verification::None))?,
        Command::WriteAndVerify => done(blocks::write(unit, cdb, data, Verification::After))?,
        Command::Verify => done(blocks::verify(unit, cdb, data))?,
        Command::Prefetch => done(blocks::prefetch(unit, cdb))?,
        Command::SynchronizeCache => done(blocks::synchronize_cache(unit, cdb))?,
        Command::CompareAndWrite => done(blocks::compare_and_write(unit, cdb, data))?,
        Command::OrWrite => done(blocks::or_write(unit, cdb, data))?,
        Command::WriteSame => done(provisioning::write_same(unit, cdb, data))?,
        Command::Unmap => done(provisioning::unmap(unit, cdb, data))?,
        Command::GetLbaStatus => provisioning::lba_status(unit, cdb)?,
        Command::ReadCapacity10 => provisioning::capacity10(unit, cdb)?,
        Command::ReadCapacity16 => provisioning::capacity16(unit, cdb),
        Command::ModeSense => mode_sense(unit, cdb)?,
        Command::ModeSelect => mode_select(unit, nexus, cdb, data)?,
        Command::Reserve => {
            unit.lock().reservations.reserve_legacy(nexus)?;
            Vec::new()
        }
        Command::Release => {
            unit.lock().reservations.release_legacy(nexus.id);
            Vec::new()
        }
        Command::PersistentReserveIn => {
            let data = unit.lock().reservations.report(cdb.byte(1) & 0x1f);
            reply::truncated(data, usize::from(cdb.u16(7)))
        }
        Command::PersistentReserveOut => reserve_out(unit, nexus, cdb, data)?,
        Command::ReportOperationCodes => report::operation_codes(cdb)?,
        Command::ReportTaskManagement => report::task_management(cdb),
        Command::StartStopUnit => done(start_stop(unit, cdb))?,
        // The medium cannot be removed, so preventing its removal has no effect. The last three were answered before.
        Command::PreventAllow
        | Command::TestUnitReady
        | Command::Inquiry
        | Command::ReportLuns
        | Command::RequestSense => Vec::new(),
    };
    Ok(DataIn::Bytes(bytes))
}

fn done(result: Result<(), DeviceFailure>) -> Result<Vec<u8>, DeviceFailure> {
    result.map(|()| Vec::new())
}

/// START STOP UNIT: the unit is always started; stopping it writes what is cached.
fn start_stop(unit: &LogicalUnit, cdb: &Cdb) -> Result<(), DeviceFailure> {
    const LOAD_OR_EJECT: u8 = 2;
    const NO_FLUSH: u8 = 4;
    const START: u8 = 1;
    let flags = cdb.byte(4);
    if flags & LOAD_OR_EJECT != 0 {
        return Err(Sense::INVALID_FIELD_IN_CDB.into());
    }
    match unit.device.writer() {
        Some(device) if flags & (START | NO_FLUSH) == 0 => device.flush().map_err(blocks::write_failure),
        _ => Ok(()),
    }
}

fn request_sense(invocation: &Invocation<'_>) -> Result<Vec<u8>, Failure> {
    const DESCRIPTOR_FORMAT: u8 = 1;
    let Invocation { nexus, unit, cdb, .. } = *invocation;
    if cdb.byte(1) & DESCRIPTOR_FORMAT != 0 {
        return Err(Sense::INVALID_FIELD_IN_CDB.into());
    }
    let sense = match unit {
        None => Sense::UNIT_NOT_SUPPORTED,
        Some(unit) => unit.take_attention(nexus).unwrap_or(Sense::NONE),
    };
    Ok(reply::truncated(sense.encode().to_vec(), usize::from(cdb.byte(4))))
}

fn mode_unit(unit: &LogicalUnit) -> ModeUnit {
    ModeUnit {
        is_read_only: unit.is_read_only(),
        block_count: unit.block_count,
        block_bytes: unit.options.sector_size.bytes(),
    }
}

fn mode_sense(unit: &LogicalUnit, cdb: &Cdb) -> Result<Vec<u8>, Failure> {
    let length = if cdb.byte(0) == 0x1a {
        usize::from(cdb.byte(4))
    } else {
        usize::from(cdb.u16(7))
    };
    let pages = unit.lock().pages;
    Ok(reply::truncated(mode::sense(cdb, pages, mode_unit(unit))?, length))
}

fn mode_select(unit: &LogicalUnit, nexus: &Nexus, cdb: &Cdb, data: &[u8]) -> Result<Vec<u8>, DeviceFailure> {
    let before = unit.lock().pages;
    let after = mode::select(cdb, before, mode_unit(unit), data)?;
    if before == after {
        return Ok(Vec::new());
    }
    // Data that was cached becomes durable before the cache is off.
    if let Some(device) = unit.device.writer().filter(|_| !after.has_write_cache) {
        device.flush().map_err(blocks::write_failure)?;
    }
    let mut state = unit.lock();
    state.pages = after;
    LogicalUnit::attend_others(&mut state, nexus, MODE_CHANGED);
    Ok(Vec::new())
}

fn reserve_out(unit: &LogicalUnit, nexus: &Nexus, cdb: &Cdb, data: &[u8]) -> Result<Vec<u8>, Failure> {
    const LIST_BYTES: u32 = 24;
    let list = data.first_chunk::<24>().filter(|_| cdb.u32(5) == LIST_BYTES);
    let list = list.ok_or(Sense::PARAMETER_LIST_LENGTH_ERROR)?;
    let (key, rest) = list.split_first_chunk().unwrap_or((&[0; 8], &[]));
    let action_key = rest.first_chunk().unwrap_or(&[0; 8]);
    let out = ReserveOut {
        action: cdb.byte(1) & 0x1f,
        scope_and_type: cdb.byte(2),
        key: u64::from_be_bytes(*key),
        action_key: u64::from_be_bytes(*action_key),
        flags: list[20],
    };
    let mut state = unit.lock();
    let effects = state.reservations.change(&nexus.port, &out)?;
    LogicalUnit::apply(&mut state, nexus, &effects);
    Ok(Vec::new())
}
