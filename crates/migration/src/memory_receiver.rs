//! The other host, as the receiver of a machine's memory for a hypervisor that does not reach the one there itself.

use std::path::Path;
use std::sync::mpsc::Sender as Outbox;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use holdfast_block::error_text;
use holdfast_host::{ReceiverStart, ReceivingHost, Switchover};

use crate::disks::MoveEvent;
use crate::error::Error;
use crate::far::{FarRequest, FarState};
use crate::migration_tools::MigrationTools;
use crate::plan::MigrationPlan;
use crate::resolution::AskedHost;

/// Starts of a machine that has all of its memory. It can only refuse one if it does not run.
const START_COUNT_MAX: usize = 3;

/// What becomes of the stopped machine. The first decision holds.
#[derive(Default)]
pub(crate) struct SwitchoverDecision(OnceLock<Switchover>);

impl SwitchoverDecision {
    pub(crate) fn decide(&self, switchover: Switchover) {
        self.0.set(switchover).ok();
    }
}

pub(crate) struct MemoryDestination<'a> {
    pub(crate) plan: &'a MigrationPlan,
    pub(crate) tools: &'a MigrationTools<'a>,
    /// Of the other host.
    pub(crate) socket: &'a Path,
    pub(crate) decision: Arc<SwitchoverDecision>,
    pub(crate) events: Mutex<Outbox<MoveEvent>>,
}

impl MemoryDestination<'_> {
    fn started(&self) -> ReceiverStart {
        let events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        events.send(MoveEvent::Started).ok();
        ReceiverStart::Runs
    }
}

impl ReceivingHost for MemoryDestination<'_> {
    fn prepare(&self) -> Result<(), String> {
        let request = FarRequest::ReceiveMemory {
            uuid: self.plan.uuid.clone(),
            configuration: self.plan.configuration.clone(),
            socket: self.socket.to_owned(),
        };
        self.tools
            .far
            .ask(&request)
            .map(drop)
            .map_err(|error| error_text(&error))
    }

    fn switchover(&self) -> Option<Switchover> {
        self.decision.0.get().copied()
    }

    /// The machine has moved as soon as the other host has its memory, so it is started there however often it takes. It is
    /// started here only if its hypervisor there has ended before it ran.
    fn start(&self) -> ReceiverStart {
        let uuid = &self.plan.uuid;
        let mut host = AskedHost::new(self.tools);
        let mut problem = String::new();
        for _ in 0..START_COUNT_MAX {
            match host.ask(&FarRequest::Start { uuid: uuid.clone() }) {
                Ok(_) => return self.started(),
                Err(error) => problem = error_text(&error),
            }
            match host.state(uuid) {
                Ok(FarState::Running) => return self.started(),
                Ok(FarState::Absent | FarState::ShutOff) => return ReceiverStart::IsGone(problem),
                Ok(FarState::Paused) => {}
                Err(error) => return ReceiverStart::Unknown(error_text(&error)),
            }
        }
        ReceiverStart::Unknown(problem)
    }

    /// If the connection is lost, the other host ends the hypervisor by itself.
    fn discard(&self) {
        let uuid = self.plan.uuid.clone();
        if let Err(error @ Error::Refused { .. }) = self.tools.far.ask(&FarRequest::PowerOff { uuid }) {
            self.tools.observer.left(&error_text(&error));
        }
    }
}
