//! A session in the full feature phase (RFC 7143 sections 4 and 11): a state machine from PDUs to responses and to
//! commands that can be executed.
//!
//! A session has one connection, and error recovery level 0: after an error that one PDU cannot tell the initiator of,
//! the connection is closed, and the initiator begins a new session.

mod exchange;
mod management;
mod response;
mod task;
mod text_exchange;
mod transfer;

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use holdfast_block::to_usize;

use super::frames::{Frames, StatusNumber};
use super::login::{FIRST_BURST_BYTES, Parameters};
use super::pdu::{FLAG_FINAL, Header, NO_TAG, Pdu, RejectReason, request, response as opcode};
use super::scsi::{
    Cdb, CommandResult, Invocation, LogicalUnit, Sense, UnitPlace, data_in_bytes, data_out_bytes, fails_without_data,
};
use super::target::{PORTAL_GROUP, SendTargets, send_targets};
use super::target_set::TargetSet;
use crate::server::budget::Lease;
use response::Expected;
use task::{Memory, PendingTask};
use text_exchange::TextExchange;
use transfer::{Transfer, TransferStart};

pub(crate) use exchange::{Exchange, Queued, TaskDelivery};
pub(crate) use task::{ReadyTask, SessionInfo, TaskCommand, TaskKind, TaskOrder};

/// Commands for immediate delivery that may be in progress besides the command window.
const IMMEDIATE_COUNT_MAX: usize = 16;
/// The ping that was sent last: its tag.
const PING_TAG_FLAG: u32 = 0x8000_0000;

/// The consequence of a PDU.
#[derive(Debug)]
pub(crate) enum Step {
    Continue,
    /// Execute this command.
    Execute(Box<ReadyTask>),
    /// The session ends by the wish of the initiator: send what is queued, and close the connection.
    LoggedOut,
    /// The target was reset: the sessions of all initiators end.
    TargetReset,
    /// The stream cannot be continued.
    Malformed(&'static str),
}

/// Receives queued responses.
pub(crate) type Queue<'a> = &'a mut dyn FnMut(Queued);

/// A session, without its transport.
#[derive(Debug)]
pub(crate) struct TargetSession {
    pub(crate) info: Arc<SessionInfo>,
    pub(crate) exchange: Arc<Exchange>,
    parameters: Parameters,
    connection_id: u16,
    directory: TargetDirectory,
    tasks: BTreeMap<u32, PendingTask>,
    /// Commands that wait for memory, in their order.
    starved: VecDeque<u32>,
    last_transfer_tag: u32,
    text: TextExchange,
    /// Number of pings that were sent, and whether the last one was answered.
    ping_count: u32,
    is_ping_pending: bool,
}

/// The data for lists of targets.
#[derive(Debug, Clone)]
pub(crate) struct TargetDirectory {
    pub(crate) targets: Arc<TargetSet>,
    /// Address and port at which the initiator has connected.
    pub(crate) portal: String,
}

impl TargetSession {
    pub(crate) fn new(
        info: Arc<SessionInfo>,
        exchange: Arc<Exchange>,
        parameters: Parameters,
        connection_id: u16,
        directory: TargetDirectory,
    ) -> Self {
        Self {
            info,
            exchange,
            parameters,
            connection_id,
            directory,
            tasks: BTreeMap::new(),
            starved: VecDeque::new(),
            last_transfer_tag: 0,
            text: TextExchange::default(),
            ping_count: 0,
            is_ping_pending: false,
        }
    }

    fn respond(&self, header: Header, status: StatusNumber, data: &[u8], queue: Queue<'_>) {
        let mut frames = Frames::new(self.parameters.digests);
        frames.push(header, status, data);
        self.exchange.respond(frames, queue);
    }

    fn reject(&self, pdu: &Pdu<'_>, reason: RejectReason, queue: Queue<'_>) {
        let mut header = Header::response(opcode::REJECT, FLAG_FINAL, NO_TAG);
        header.0[2] = reason as u8;
        self.respond(header, StatusNumber::Advance, &pdu.header.0, queue);
    }

    /// Handles a PDU.
    pub(crate) fn receive(&mut self, pdu: &Pdu<'_>, queue: Queue<'_>) -> Step {
        let header = &pdu.header;
        let is_command = header.opcode() == request::SCSI_COMMAND;
        match header.opcode() {
            request::DATA_OUT => return self.data_out(pdu, queue),
            request::SNACK => {
                self.reject(pdu, RejectReason::SnackReject, queue);
                return Step::Continue;
            }
            _ => {}
        }
        match self.accept_number(header) {
            Turn::Now => {}
            Turn::Never => return Step::Continue,
            Turn::Later => return Step::Malformed("a command number is missing"),
        }
        if !is_command && !pdu.is_data_intact {
            self.reject(pdu, RejectReason::InvalidField, queue);
            return Step::Continue;
        }
        match header.opcode() {
            request::SCSI_COMMAND if self.info.target.is_some() => return self.command(pdu, queue),
            request::TASK_MANAGEMENT if self.info.target.is_some() => return self.manage(pdu, queue),
            request::NOP_OUT => self.nop(pdu, queue),
            request::TEXT => self.text(pdu, queue),
            request::LOGOUT => return self.logout(pdu, queue),
            request::LOGIN => self.reject(pdu, RejectReason::ProtocolError, queue),
            _ => self.reject(pdu, RejectReason::CommandNotSupported, queue),
        }
        Step::Continue
    }

    /// Whether it is the turn of a request, by its command number (RFC 7143 section 4.2.2.1).
    fn accept_number(&self, header: &Header) -> Turn {
        if header.is_immediate() {
            return Turn::Now;
        }
        let mut turn = Turn::Never;
        self.exchange.update(|numbers| {
            let distance = header.command_number().wrapping_sub(numbers.expected_command);
            let room = numbers
                .command_max()
                .wrapping_sub(numbers.expected_command)
                .wrapping_add(1);
            if distance == 0 && room > 0 {
                numbers.expected_command = numbers.expected_command.wrapping_add(1);
                turn = Turn::Now;
            } else if distance < room {
                turn = Turn::Later;
            }
        });
        turn
    }

    fn command(&mut self, pdu: &Pdu<'_>, queue: Queue<'_>) -> Step {
        let header = &pdu.header;
        let task_tag = header.task_tag();
        let delivery = if header.is_immediate() {
            TaskDelivery::Immediate
        } else {
            // Counted from now on, so that the window never shrinks.
            self.exchange.update(|numbers| numbers.command_count += 1);
            TaskDelivery::InOrder
        };
        let is_known = self.tasks.contains_key(&task_tag) || self.exchange.is_executing(task_tag);
        let reason = if is_known || task_tag == NO_TAG {
            Some(RejectReason::ProtocolError)
        } else if delivery == TaskDelivery::Immediate && self.immediate_count() >= IMMEDIATE_COUNT_MAX {
            Some(RejectReason::TooManyImmediateCommands)
        } else {
            None
        };
        if let Some(reason) = reason {
            if delivery == TaskDelivery::InOrder {
                self.uncount();
            }
            self.reject(pdu, reason, queue);
            return Step::Continue;
        }
        let task = self.task(pdu, delivery);
        if let Memory::Wanted(_) = task.memory {
            self.starved.push_back(task_tag);
        }
        self.tasks.insert(task_tag, task);
        self.advance(task_tag, queue)
    }

    fn uncount(&self) {
        self.exchange
            .update(|numbers| numbers.command_count = numbers.command_count.saturating_sub(1));
    }

    /// Commands beyond the window: at least so many are for immediate delivery.
    fn immediate_count(&self) -> usize {
        let all = self.tasks.len() + self.exchange.executing_count();
        all.saturating_sub(to_usize(u64::from(self.exchange.numbers().command_count)))
    }

    fn task(&self, pdu: &Pdu<'_>, delivery: TaskDelivery) -> PendingTask {
        const WRITE: u8 = 0x20;
        const ORDERED: u8 = 2;
        let header = &pdu.header;
        let cdb = Cdb(header.field(32));
        let unit = self.info.target.as_ref().and_then(|target| target.unit(header.lun()));
        let offered = header.word_20();
        let taken = data_out_bytes(unit.as_deref(), &cdb);
        let is_write = header.flags() & WRITE != 0;
        let expected = if is_write {
            Expected::Out { offered, taken }
        } else {
            Expected::In(if header.flags() & 0x40 != 0 { offered } else { 0 })
        };
        let mut result = self.early_result(unit.as_deref(), &cdb);
        // A command that takes data needs an initiator that sends it.
        if !is_write && taken > 0 {
            result.get_or_insert(CommandResult::check(Sense::INVALID_FIELD_IN_CDB));
        }
        let start = TransferStart {
            pdu,
            offered: if is_write { offered } else { 0 },
            taken: if result.is_some() { 0 } else { taken },
        };
        let transfer = Transfer::new(&start, &self.parameters);
        let bytes = match expected {
            Expected::In(expected) => data_in_bytes(unit.as_deref(), &cdb).min(u64::from(expected)),
            Expected::Out { .. } => start.taken.min(u64::from(offered)),
        };
        let is_small = bytes <= u64::from(FIRST_BURST_BYTES);
        PendingTask {
            command: TaskCommand {
                task_tag: header.task_tag(),
                cdb,
                lun: header.lun(),
                abort_count: unit.as_ref().map_or(0, |unit| unit.abort_count(&self.info.nexus)),
                unit,
                expected,
                order: if header.flags() & 7 == ORDERED {
                    TaskOrder::Ordered
                } else {
                    TaskOrder::Any
                },
                result,
            },
            transfer,
            memory: if is_small {
                Memory::Granted(None)
            } else {
                Memory::Wanted(bytes)
            },
            delivery,
        }
    }

    fn early_result(&self, unit: Option<&LogicalUnit>, cdb: &Cdb) -> Option<CommandResult> {
        let target = self.info.target.as_ref()?;
        fails_without_data(&Invocation {
            nexus: &self.info.nexus,
            unit,
            place: UnitPlace {
                target_name: target.name(),
                portal_group: PORTAL_GROUP,
            },
            unit_numbers: &target.unit_numbers(),
            cdb,
            data: &[],
            offered: 0,
        })
    }

    /// Requests data for a task, or returns it if it is complete.
    fn advance(&mut self, task_tag: u32, queue: Queue<'_>) -> Step {
        let Some(task) = self.tasks.get_mut(&task_tag) else {
            return Step::Continue;
        };
        if let Some(sense) = task.transfer.failure() {
            task.command.result = Some(CommandResult::check(sense));
        }
        let is_lost = task.command.result.is_some();
        if matches!(task.memory, Memory::Wanted(_)) && !is_lost {
            return Step::Continue;
        }
        if is_lost {
            task.transfer.give_up();
        }
        while let Some(wanted) = task.transfer.request(self.last_transfer_tag, &self.parameters) {
            let mut header = Header::response(opcode::READY_TO_TRANSFER, FLAG_FINAL, task_tag);
            header.set(8, &task.command.lun);
            header.set_u32(20, wanted.tag);
            header.set_u32(36, wanted.number);
            header.set_u32(40, wanted.offset);
            header.set_u32(44, wanted.length);
            let mut frames = Frames::new(self.parameters.digests);
            frames.push(header, StatusNumber::Next, &[]);
            self.exchange.respond(frames, queue);
            self.last_transfer_tag = (self.last_transfer_tag + 1) % PING_TAG_FLAG;
        }
        if !task.transfer.is_complete() {
            return Step::Continue;
        }
        let Some(task) = self.tasks.remove(&task_tag) else {
            return Step::Continue;
        };
        self.starved.retain(|tag| *tag != task_tag);
        self.exchange.begin(task_tag, task.command.lun, task.delivery);
        Step::Execute(Box::new(ReadyTask {
            command: task.command,
            data: task.transfer.into_data(),
            lease: match task.memory {
                Memory::Granted(lease) => lease,
                Memory::Wanted(_) => None,
            },
            parameters: self.parameters,
        }))
    }

    /// Takes data. Data for a task that does not exist was sent before the initiator learned of its end.
    fn data_out(&mut self, pdu: &Pdu<'_>, queue: Queue<'_>) -> Step {
        let task_tag = pdu.header.task_tag();
        match self.tasks.get_mut(&task_tag) {
            Some(task) => {
                task.transfer.receive(pdu);
                self.advance(task_tag, queue)
            }
            None => Step::Continue,
        }
    }

    /// The next command that needs memory: its tag, and the number of bytes.
    pub(crate) fn wanted_memory(&self) -> Option<MemoryRequest> {
        let task_tag = *self.starved.front()?;
        match self.tasks.get(&task_tag)?.memory {
            Memory::Wanted(bytes) => Some(MemoryRequest { task_tag, bytes }),
            Memory::Granted(_) => None,
        }
    }

    /// Whether commands that have memory wait for data: only this thread can make them return it.
    pub(crate) fn holds_memory(&self) -> bool {
        let holds = |task: &PendingTask| matches!(task.memory, Memory::Granted(Some(_)));
        self.tasks.values().any(holds)
    }

    /// Gives memory to a command.
    pub(crate) fn grant(&mut self, task_tag: u32, lease: Lease, queue: Queue<'_>) -> Step {
        self.starved.retain(|tag| *tag != task_tag);
        if let Some(task) = self.tasks.get_mut(&task_tag) {
            task.memory = Memory::Granted(Some(lease));
        }
        self.advance(task_tag, queue)
    }

    fn nop(&mut self, pdu: &Pdu<'_>, queue: Queue<'_>) {
        if pdu.header.task_tag() == NO_TAG {
            // The answer to a ping of ours.
            self.is_ping_pending = false;
            return;
        }
        let mut header = Header::response(opcode::NOP_IN, FLAG_FINAL, pdu.header.task_tag());
        header.set_u32(20, NO_TAG);
        let length = to_usize(u64::from(self.parameters.send_segment_bytes)).min(pdu.data.len());
        let data = pdu.data.get(..length).unwrap_or(pdu.data);
        self.respond(header, StatusNumber::Advance, data, queue);
    }

    /// Asks the initiator whether it is still there. Returns whether the last ping was answered.
    pub(crate) fn ping(&mut self, queue: Queue<'_>) -> bool {
        if self.is_ping_pending {
            return false;
        }
        self.is_ping_pending = true;
        self.ping_count = (self.ping_count + 1) % PING_TAG_FLAG;
        let mut header = Header::response(opcode::NOP_IN, FLAG_FINAL, NO_TAG);
        header.set_u32(20, PING_TAG_FLAG | self.ping_count);
        // A tag of all ones would mean that no answer is wanted.
        if header.u32(20) == NO_TAG {
            header.set_u32(20, PING_TAG_FLAG);
        }
        self.respond(header, StatusNumber::Next, &[], queue);
        true
    }

    fn text(&mut self, pdu: &Pdu<'_>, queue: Queue<'_>) {
        let directory = &self.directory;
        let info = &self.info;
        let list = |name: Option<&str>| {
            // An empty name means the target of this session.
            let own = info.target.as_ref().map(|target| target.name());
            let name = if name == Some("") { own.or(name) } else { name };
            let wanted = SendTargets {
                name,
                initiator: &info.nexus.port.name,
                portal: &directory.portal,
            };
            send_targets(&directory.targets.list(), &wanted)
        };
        match self.text.request(pdu, &mut self.parameters, &list) {
            Ok(answer) => {
                let mut header = Header::response(opcode::TEXT, answer.flags, pdu.header.task_tag());
                header.set(8, &pdu.header.lun());
                header.set_u32(20, answer.tag);
                self.respond(header, StatusNumber::Advance, &answer.data, queue);
            }
            Err(reason) => self.reject(pdu, reason, queue),
        }
    }

    fn logout(&mut self, pdu: &Pdu<'_>, queue: Queue<'_>) -> Step {
        const CLOSE_SESSION: u8 = 0;
        const CLOSE_CONNECTION: u8 = 1;
        const NO_SUCH_CONNECTION: u8 = 1;
        const RECOVERY_NOT_SUPPORTED: u8 = 2;
        let reason = pdu.header.flags() & 0x7f;
        let answer = match reason {
            CLOSE_SESSION => 0,
            CLOSE_CONNECTION if pdu.header.u16(20) == self.connection_id => 0,
            CLOSE_CONNECTION => NO_SUCH_CONNECTION,
            _ => RECOVERY_NOT_SUPPORTED,
        };
        let mut header = Header::response(opcode::LOGOUT, FLAG_FINAL, pdu.header.task_tag());
        header.0[2] = answer;
        self.respond(header, StatusNumber::Advance, &[], queue);
        if answer == 0 { Step::LoggedOut } else { Step::Continue }
    }
}

/// A command that needs memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MemoryRequest {
    pub(crate) task_tag: u32,
    pub(crate) bytes: u64,
}

/// Whether it is the turn of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Turn {
    Now,
    /// Its number is outside of the window: "the target MUST silently ignore" it.
    Never,
    /// An earlier one is missing, and cannot come any more on the only connection.
    Later,
}
