//! The targets of a server, which change while it runs.

use std::sync::{Arc, PoisonError, RwLock};

use super::scsi::LogicalUnit;
use super::target::{InitiatorAccess, Target, UnitsLeft};
use crate::{Error, Result};

/// Targets of one server: their list must fit into the answers to discovery.
const TARGET_COUNT_MAX: usize = 4096;

/// The place of a logical unit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnitPosition {
    /// The name of its target.
    pub target: String,
    /// Its number in the target.
    pub number: u8,
}

/// The targets of a server.
#[derive(Debug, Default)]
pub struct TargetSet {
    targets: RwLock<Vec<Arc<Target>>>,
}

impl TargetSet {
    /// A set of these targets.
    pub fn new(targets: impl IntoIterator<Item = Target>) -> Self {
        Self {
            targets: RwLock::new(targets.into_iter().map(Arc::new).collect()),
        }
    }

    /// The targets.
    pub(crate) fn list(&self) -> Vec<Arc<Target>> {
        self.targets.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Adds a unit to the target with this name, which is created with this access if it does not exist.
    pub fn add_unit(&self, target: &str, access: &InitiatorAccess, unit: LogicalUnit) -> Result<UnitPosition> {
        let mut targets = self.targets.write().unwrap_or_else(PoisonError::into_inner);
        let found = targets.iter().find(|known| known.name().eq_ignore_ascii_case(target));
        let number = if let Some(found) = found {
            found.add_unit(unit)?
        } else {
            if targets.len() >= TARGET_COUNT_MAX {
                return Err(Error::TargetCount {
                    count_max: TARGET_COUNT_MAX,
                });
            }
            targets.push(Arc::new(Target::new(target, access.clone(), vec![unit])?));
            0
        };
        Ok(UnitPosition {
            target: target.to_owned(),
            number,
        })
    }

    /// Removes a unit, and its target if it has no other unit: initiators that are logged in can still send commands to
    /// the units that they use until their sessions end, but no initiator can log in.
    pub fn remove_unit(&self, position: &UnitPosition) {
        let mut targets = self.targets.write().unwrap_or_else(PoisonError::into_inner);
        let found = targets.iter().position(|target| target.name() == position.target);
        if let Some(at) = found
            && let Some(target) = targets.get(at)
            && target.remove_unit(position.number) == UnitsLeft::None
        {
            targets.remove(at);
        }
    }
}
