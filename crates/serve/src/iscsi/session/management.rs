//! Task management (RFC 7143 sections 4.2.3 and 11.5).

use std::sync::Arc;

use super::super::frames::{Frames, StatusNumber};
use super::super::pdu::{FLAG_FINAL, Header, Pdu, RejectReason, response as opcode};
use super::super::scsi::{LogicalUnit, UnitReset};
use super::exchange::TaskDelivery;
use super::{Queue, Step, TargetSession};

/// Responses to task management that may wait for tasks.
const WAITING_COUNT_MAX: usize = 64;

/// The outcome of a function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum FunctionOutcome {
    Complete = 0,
    NoSuchTask = 1,
    NoSuchUnit = 2,
    ReassignNotSupported = 4,
    NotSupported = 5,
    Rejected = 255,
}

impl TargetSession {
    /// Handles a task management request.
    pub(super) fn manage(&mut self, pdu: &Pdu<'_>, queue: Queue<'_>) -> Step {
        const ABORT_TASK: u8 = 1;
        const ABORT_TASK_SET: u8 = 2;
        const CLEAR_ACA: u8 = 3;
        const CLEAR_TASK_SET: u8 = 4;
        const UNIT_RESET: u8 = 5;
        const TARGET_WARM_RESET: u8 = 6;
        const TARGET_COLD_RESET: u8 = 7;
        const TASK_REASSIGN: u8 = 8;
        if self.exchange.waiting_count() >= WAITING_COUNT_MAX {
            self.reject(pdu, RejectReason::TooManyImmediateCommands, queue);
            return Step::Continue;
        }
        let function = pdu.header.flags() & 0x7f;
        let unit = self
            .info
            .target
            .as_ref()
            .and_then(|target| target.unit(pdu.header.lun()));
        let outcome = match (function, &unit) {
            (ABORT_TASK, _) => return self.abort_task(pdu, queue),
            (ABORT_TASK_SET | CLEAR_TASK_SET | UNIT_RESET, None) => FunctionOutcome::NoSuchUnit,
            (ABORT_TASK_SET, Some(unit)) => return self.abort_unit(pdu, unit, None, queue),
            (CLEAR_TASK_SET, Some(unit)) => return self.abort_unit(pdu, unit, Some(UnitReset::ClearTasks), queue),
            (UNIT_RESET, Some(unit)) => return self.abort_unit(pdu, unit, Some(UnitReset::Reset), queue),
            (TARGET_WARM_RESET, _) => return self.reset_target(pdu, queue),
            (TARGET_COLD_RESET, _) => {
                self.reset_target(pdu, queue);
                return Step::TargetReset;
            }
            (CLEAR_ACA, _) => FunctionOutcome::NotSupported,
            (TASK_REASSIGN, _) => FunctionOutcome::ReassignNotSupported,
            _ => FunctionOutcome::Rejected,
        };
        let frames = self.management_response(pdu, outcome);
        self.exchange.respond(frames, queue);
        Step::Continue
    }

    fn management_response(&self, pdu: &Pdu<'_>, outcome: FunctionOutcome) -> Frames {
        let mut header = Header::response(opcode::TASK_MANAGEMENT, FLAG_FINAL, pdu.header.task_tag());
        header.0[2] = outcome as u8;
        let mut frames = Frames::new(self.parameters.digests);
        frames.push(header, StatusNumber::Advance, &[]);
        frames
    }

    fn abort_task(&mut self, pdu: &Pdu<'_>, queue: Queue<'_>) -> Step {
        let task_tag = pdu.header.word_20();
        let is_there = self.discard(|tag, _| tag == task_tag) > 0 || self.exchange.is_executing(task_tag);
        let outcome = if is_there {
            FunctionOutcome::Complete
        } else {
            FunctionOutcome::NoSuchTask
        };
        let frames = self.management_response(pdu, outcome);
        self.exchange.abort(&|tag| tag == task_tag, frames, queue);
        Step::Continue
    }

    /// Ends this session's tasks of a unit, and those of other sessions if `reset` says so.
    fn abort_unit(
        &mut self,
        pdu: &Pdu<'_>,
        unit: &Arc<LogicalUnit>,
        reset: Option<UnitReset>,
        queue: Queue<'_>,
    ) -> Step {
        self.discard(|_, task_unit| task_unit.is_some_and(|one| Arc::ptr_eq(one, unit)));
        if let Some(reset) = reset {
            unit.reset(&self.info.nexus, reset);
        }
        let frames = self.management_response(pdu, FunctionOutcome::Complete);
        let tags = self.exchange.tags_of(pdu.header.lun());
        self.exchange.abort(&|tag| tags.contains(&tag), frames, queue);
        Step::Continue
    }

    fn reset_target(&mut self, pdu: &Pdu<'_>, queue: Queue<'_>) -> Step {
        self.discard(|_, _| true);
        if let Some(target) = &self.info.target {
            for unit in target.units() {
                unit.reset(&self.info.nexus, UnitReset::Reset);
            }
        }
        let frames = self.management_response(pdu, FunctionOutcome::Complete);
        self.exchange.abort(&|_| true, frames, queue);
        Step::Continue
    }

    /// Removes tasks whose data has not arrived. Returns their number.
    fn discard(&mut self, is_affected: impl Fn(u32, Option<&Arc<LogicalUnit>>) -> bool) -> usize {
        let before = self.tasks.len();
        let mut in_order = 0;
        self.tasks.retain(|tag, task| {
            let is_kept = !is_affected(*tag, task.command.unit.as_ref());
            if !is_kept && task.delivery == TaskDelivery::InOrder {
                in_order += 1;
            }
            is_kept
        });
        let tasks = &self.tasks;
        self.starved.retain(|tag| tasks.contains_key(tag));
        self.exchange
            .update(|numbers| numbers.command_count = numbers.command_count.saturating_sub(in_order));
        before - self.tasks.len()
    }
}
