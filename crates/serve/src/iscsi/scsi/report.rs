//! Reports of a logical unit about itself and its target (SPC-4 sections 6.33, 6.35 and 6.36).

use holdfast_block::to_usize;

use super::cdb::{COMMANDS, Cdb, CommandInfo};
use super::reply::truncated;
use super::sense::{Failure, Sense};

/// REPORT LUNS: the numbers of all units of the target.
pub(super) fn luns(unit_numbers: &[u8], cdb: &Cdb) -> Result<Vec<u8>, Failure> {
    const WELL_KNOWN_ONLY: u8 = 1;
    let numbers = match cdb.byte(2) {
        0 | 2 => unit_numbers,
        WELL_KNOWN_ONLY => &[],
        _ => return Err(Sense::INVALID_FIELD_IN_CDB.into()),
    };
    let length = to_usize(u64::from(cdb.u32(6)));
    if length < 16 {
        return Err(Sense::INVALID_FIELD_IN_CDB.into());
    }
    let mut data = u32::try_from(8 * numbers.len())
        .unwrap_or(u32::MAX)
        .to_be_bytes()
        .to_vec();
    data.extend([0; 4]);
    for number in numbers {
        data.extend([0, *number, 0, 0, 0, 0, 0, 0]);
    }
    Ok(truncated(data, length))
}

/// REPORT SUPPORTED OPERATION CODES.
pub(super) fn operation_codes(cdb: &Cdb) -> Result<Vec<u8>, Failure> {
    const WITH_TIMEOUTS: u8 = 0x80;
    let has_timeouts = cdb.byte(2) & WITH_TIMEOUTS != 0;
    let opcode = cdb.byte(3);
    let action = u8::try_from(cdb.u16(4)).ok();
    let mut rows = COMMANDS.iter().filter(|row| row.opcode() == opcode).peekable();
    let has_actions = rows.peek().is_some_and(|row| row.service_action.is_some());
    let data = match cdb.byte(2) & 7 {
        0 => all_codes(has_timeouts),
        // "If the REQUESTED OPERATION CODE field specifies an operation code that has service actions, the command
        // shall be terminated"; and likewise the other way round.
        1 if has_actions => return Err(Sense::INVALID_FIELD_IN_CDB.into()),
        2 if !has_actions && rows.peek().is_some() => return Err(Sense::INVALID_FIELD_IN_CDB.into()),
        1 => one_code(rows.next(), has_timeouts),
        2 => one_code(rows.find(|row| row.service_action == action), has_timeouts),
        3 if has_actions => one_code(rows.find(|row| row.service_action == action), has_timeouts),
        3 => one_code(rows.next().filter(|_| cdb.u16(4) == 0), has_timeouts),
        _ => return Err(Sense::INVALID_FIELD_IN_CDB.into()),
    };
    Ok(truncated(data, to_usize(u64::from(cdb.u32(6)))))
}

/// A descriptor of no timeouts.
const TIMEOUTS: [u8; 12] = [0, 10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];

fn all_codes(has_timeouts: bool) -> Vec<u8> {
    const SERVICE_ACTION_VALID: u8 = 1;
    const TIMEOUTS_PRESENT: u8 = 2;
    let mut list = Vec::new();
    for row in COMMANDS {
        let action = row.service_action;
        let mut flags = if action.is_some() { SERVICE_ACTION_VALID } else { 0 };
        if has_timeouts {
            flags |= TIMEOUTS_PRESENT;
        }
        let length = u8::try_from(row.usage.len()).unwrap_or(0);
        list.extend([row.opcode(), 0, 0, action.unwrap_or(0), 0, flags, 0, length]);
        if has_timeouts {
            list.extend(TIMEOUTS);
        }
    }
    let mut data = u32::try_from(list.len()).unwrap_or(u32::MAX).to_be_bytes().to_vec();
    data.extend(list);
    data
}

fn one_code(row: Option<&CommandInfo>, has_timeouts: bool) -> Vec<u8> {
    const NOT_SUPPORTED: u8 = 1;
    const SUPPORTED: u8 = 3;
    const TIMEOUTS_PRESENT: u8 = 0x80;
    let Some(row) = row else {
        return vec![0, NOT_SUPPORTED, 0, 0];
    };
    let flags = if has_timeouts { TIMEOUTS_PRESENT } else { 0 };
    let mut usage = row.usage.to_vec();
    if let (Some(action), Some(byte)) = (row.service_action, usage.get_mut(1)) {
        *byte = action;
    }
    let mut data = vec![0, SUPPORTED | flags, 0, u8::try_from(usage.len()).unwrap_or(0)];
    data.extend(usage);
    if has_timeouts {
        data.extend(TIMEOUTS);
    }
    data
}

/// REPORT SUPPORTED TASK MANAGEMENT FUNCTIONS.
pub(super) fn task_management(cdb: &Cdb) -> Vec<u8> {
    // ABORT TASK, ABORT TASK SET, CLEAR TASK SET and LOGICAL UNIT RESET, and target resets.
    const SUPPORTED: u8 = 0xda;
    const EXTENDED: u8 = 0x80;
    let mut data = vec![SUPPORTED, 0, 0, 0];
    if cdb.byte(2) & EXTENDED != 0 {
        data = vec![SUPPORTED, 0, 0, 12];
        data.resize(16, 0);
    }
    truncated(data, to_usize(u64::from(cdb.u32(6))))
}
