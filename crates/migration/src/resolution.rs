//! Where a machine runs after its hypervisor has failed at the end of the migration.

use std::time::Duration;

use holdfast_host::MachineState;

use crate::error::Result;
use crate::far::{FarAnswer, FarHost, FarRequest, FarState};
use crate::migration_tools::MigrationTools;

/// How long the other host is asked, whose hypervisor may be starting again.
const PATIENCE: Duration = Duration::from_secs(60);
const INTERVAL: Duration = Duration::from_secs(1);

/// What follows from the states at both hosts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Resolution {
    /// It runs there, and not here.
    Moved,
    /// It runs here: it must not go on there.
    PowerOffThere,
    /// It runs here, and not there.
    StaysHere,
    /// It runs nowhere, or may run there.
    Unknown,
}

impl Resolution {
    /// From the states at both hosts, as far as they are known.
    pub(crate) fn of(here: Option<MachineState>, there: Option<FarState>) -> Self {
        match (here, there) {
            (Some(MachineState::Running), Some(FarState::Running | FarState::Paused)) => Self::PowerOffThere,
            (Some(MachineState::Running), Some(FarState::Absent | FarState::ShutOff)) => Self::StaysHere,
            (_, Some(FarState::Running)) => Self::Moved,
            _ => Self::Unknown,
        }
    }
}

/// The other host, which may be reached again after its program or its hypervisor has ended.
pub(crate) struct AskedHost<'a> {
    tools: &'a MigrationTools<'a>,
    again: Option<FarHost>,
}

impl<'a> AskedHost<'a> {
    pub(crate) fn new(tools: &'a MigrationTools<'a>) -> Self {
        Self { tools, again: None }
    }

    fn far(&self) -> &FarHost {
        self.again.as_ref().unwrap_or(self.tools.far)
    }

    /// The state of a machine there.
    ///
    /// # Errors
    /// The host has not answered within a minute.
    pub(crate) fn state(&mut self, uuid: &str) -> Result<FarState> {
        let clock = &*self.tools.clock;
        let until = clock.now() + PATIENCE;
        loop {
            let state = self.far().state(uuid);
            if state.is_ok() || clock.now() >= until {
                return state;
            }
            clock.sleep(INTERVAL);
            self.again = (self.tools.reach_far_again)().ok();
        }
    }

    /// Switches a machine off there.
    pub(crate) fn power_off(&self, uuid: &str) -> Result<()> {
        let uuid = uuid.to_owned();
        self.ask(&FarRequest::PowerOff { uuid }).map(drop)
    }

    pub(crate) fn ask(&self, request: &FarRequest) -> Result<FarAnswer> {
        self.far().ask(request)
    }
}

#[cfg(test)]
mod tests {
    use holdfast_host::MachineState;

    use super::Resolution;
    use crate::far::FarState;

    #[test]
    fn a_machine_runs_on_at_one_host_only() {
        let there = [FarState::Absent, FarState::ShutOff, FarState::Running, FarState::Paused];
        let of = |here| there.map(|there| Resolution::of(here, Some(there)));
        let (off, stays, unknown) = (Resolution::PowerOffThere, Resolution::StaysHere, Resolution::Unknown);
        assert_eq!(of(Some(MachineState::Running)), [stays, stays, off, off]);
        for here in [Some(MachineState::ShutOff), Some(MachineState::Paused), None] {
            assert_eq!(of(here), [unknown, unknown, Resolution::Moved, unknown]);
            assert_eq!(Resolution::of(here, None), unknown);
        }
        // A host that does not answer may have started it.
        assert_eq!(Resolution::of(Some(MachineState::Running), None), unknown);
    }
}
