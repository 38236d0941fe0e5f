//! The other host, as the receiver of a machine's memory for a hypervisor that does not reach the one there itself.

use std::path::Path;
use std::sync::mpsc::Sender as Outbox;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

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
pub(crate) struct SwitchoverDecision {
    switchover: Mutex<Option<Switchover>>,
    is_made: Condvar,
}

impl SwitchoverDecision {
    pub(crate) fn decide(&self, switchover: Switchover) {
        let mut made = self.switchover.lock().unwrap_or_else(PoisonError::into_inner);
        made.get_or_insert(switchover);
        self.is_made.notify_all();
    }

    fn wait(&self, patience: Duration) -> Option<Switchover> {
        let made = self.switchover.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.is_made.wait_timeout_while(made, patience, |made| made.is_none());
        *waited.unwrap_or_else(PoisonError::into_inner).0
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

    fn wait_for_switchover(&self, patience: Duration) -> Option<Switchover> {
        self.decision.wait(patience)
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
