//! A SCSI command of a session: pending while its data arrives, and ready when it can be executed.

use std::sync::Arc;

use holdfast_block::Error as DeviceError;

use super::super::frames::Frames;
use super::super::login::Parameters;
use super::super::nexus::Nexus;
use super::super::scsi::{
    Cdb, Command, CommandResult, Invocation, LogicalUnit, ScsiStatus, UnitPlace, command_of, execute,
};
use super::super::target::{PORTAL_GROUP, Target};
use super::exchange::TaskDelivery;
use super::response::{Answered, Expected};
use super::transfer::Transfer;
use crate::server::budget::Lease;

/// The parties of a session in the full feature phase.
#[derive(Debug, Clone)]
pub(crate) struct SessionInfo {
    pub(crate) nexus: Nexus,
    /// `None` in a discovery session.
    pub(crate) target: Option<Arc<Target>>,
}

/// The memory of a command.
#[derive(Debug)]
pub(super) enum Memory {
    /// So many bytes are needed before data is requested or read.
    Wanted(u64),
    Granted(Option<Lease>),
}

/// A command whose data has not arrived yet, or that waits for memory.
#[derive(Debug)]
pub(super) struct PendingTask {
    pub(super) command: TaskCommand,
    pub(super) transfer: Transfer,
    pub(super) memory: Memory,
    pub(super) delivery: TaskDelivery,
}

/// A command without its data.
#[derive(Debug, Clone)]
pub(crate) struct TaskCommand {
    pub(crate) task_tag: u32,
    pub(crate) cdb: Cdb,
    /// The LUN field.
    pub(crate) lun: [u8; 8],
    pub(super) unit: Option<Arc<LogicalUnit>>,
    pub(super) expected: Expected,
    pub(crate) order: TaskOrder,
    /// The unit's count of aborts when the command arrived.
    pub(super) abort_count: u64,
    /// The result, if it is known without execution.
    pub(super) result: Option<CommandResult>,
}

/// The order of a task relative to others (SAM-5 section 8.6).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TaskOrder {
    Any,
    /// After all earlier tasks, and before all later ones.
    Ordered,
}

/// A command that can be executed.
#[derive(Debug)]
pub(crate) struct ReadyTask {
    pub(crate) command: TaskCommand,
    pub(crate) data: Vec<u8>,
    pub(crate) lease: Option<Lease>,
    pub(super) parameters: Parameters,
}

/// The class of a command, for the measurement of its time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TaskKind {
    /// It is answered from memory.
    Inquiry,
    Read,
    Write,
    /// It reaches the medium.
    Durable,
    Other,
}

impl ReadyTask {
    /// Executes the command, and encodes its response. The second value is the error of the device, if it failed.
    pub(crate) fn run(&self, session: &SessionInfo) -> (Frames, Option<DeviceError>) {
        let (result, error) = self.result(session);
        let device = self.command.unit.as_ref().map(|unit| unit.reader());
        let answered = Answered {
            task_tag: self.command.task_tag,
            expected: self.command.expected,
            parameters: &self.parameters,
        };
        let (frames, read_error) = answered.encode(&result, device);
        (frames, error.or(read_error))
    }

    /// The response to a command whose execution has panicked.
    pub(crate) fn panicked(&self) -> Frames {
        let answered = Answered {
            task_tag: self.command.task_tag,
            expected: self.command.expected,
            parameters: &self.parameters,
        };
        let result = CommandResult::check(super::super::scsi::Sense::INTERNAL_FAILURE);
        answered.encode(&result, None).0
    }

    fn result(&self, session: &SessionInfo) -> (CommandResult, Option<DeviceError>) {
        let command = &self.command;
        if let Some(result) = &command.result {
            return (result.clone(), None);
        }
        let Some(target) = &session.target else {
            return (CommandResult::status(ScsiStatus::TaskAborted), None);
        };
        let is_aborted = |unit: &Arc<LogicalUnit>| unit.abort_count(&session.nexus) != command.abort_count;
        if command.unit.as_ref().is_some_and(is_aborted) {
            return (CommandResult::status(ScsiStatus::TaskAborted), None);
        }
        execute(&Invocation {
            nexus: &session.nexus,
            unit: command.unit.as_deref(),
            place: UnitPlace {
                target_name: target.name(),
                portal_group: PORTAL_GROUP,
            },
            unit_numbers: &target.unit_numbers(),
            cdb: &command.cdb,
            data: &self.data,
            offered: match command.expected {
                Expected::In(_) => 0,
                Expected::Out { offered, .. } => offered,
            },
        })
    }

    /// Number of bytes of the device that the command transfers.
    pub(crate) fn byte_count(&self) -> u64 {
        match self.command.expected {
            Expected::In(expected) => u64::from(expected),
            Expected::Out { .. } => self.data.len() as u64,
        }
    }

    pub(crate) fn kind(&self) -> TaskKind {
        const FORCE_UNIT_ACCESS: u8 = 0x08;
        let cdb = &self.command.cdb;
        let is_forced = cdb.byte(0) >= 0x20 && cdb.byte(1) & FORCE_UNIT_ACCESS != 0;
        if self.command.result.is_some() {
            return TaskKind::Inquiry;
        }
        match command_of(cdb) {
            Some(Command::Read) => TaskKind::Read,
            Some(Command::Write) if is_forced => TaskKind::Durable,
            Some(Command::Write) => TaskKind::Write,
            Some(Command::SynchronizeCache | Command::WriteAndVerify | Command::StartStopUnit) => TaskKind::Durable,
            Some(
                Command::Verify
                | Command::Prefetch
                | Command::WriteSame
                | Command::Unmap
                | Command::CompareAndWrite
                | Command::OrWrite
                | Command::GetLbaStatus
                | Command::ModeSelect,
            ) => TaskKind::Other,
            _ => TaskKind::Inquiry,
        }
    }

    /// A description of the command for the log.
    pub(crate) fn action(&self) -> &'static str {
        match self.kind() {
            TaskKind::Read => "read",
            TaskKind::Write | TaskKind::Durable => "write",
            TaskKind::Inquiry | TaskKind::Other => "execute a command",
        }
    }
}
