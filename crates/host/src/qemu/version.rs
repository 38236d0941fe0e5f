//! The version of a QEMU.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::qemu::qmp::{Monitor, MonitorError, QmpCommand, Result};

const COMMAND: &str = "query-version";

/// A version of QEMU; later versions are greater.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct QemuVersion {
    /// The major version.
    pub major: u64,
    /// The minor version.
    pub minor: u64,
    /// The micro version, which counts the releases of a stable branch.
    pub micro: u64,
}

impl QemuVersion {
    /// The version with these three numbers.
    pub const fn new(major: u64, minor: u64, micro: u64) -> Self {
        Self { major, minor, micro }
    }

    /// Queries a QEMU.
    pub fn query(monitor: &dyn Monitor) -> Result<Self> {
        let answer = monitor.execute(&QmpCommand::new(COMMAND, Value::Null))?;
        let number = |key: &str| answer.pointer(&format!("/qemu/{key}")).and_then(Value::as_u64);
        match (number("major"), number("minor"), number("micro")) {
            (Some(major), Some(minor), Some(micro)) => Ok(Self { major, minor, micro }),
            _ => Err(MonitorError::Invalid {
                command: COMMAND.to_owned(),
                detail: "no version numbers".to_owned(),
            }),
        }
    }

    /// The version in what `--version` prints.
    pub(crate) fn in_text(text: &str) -> Option<Self> {
        let words = text.split_whitespace();
        let mut after = words.skip_while(|word| *word != "version").skip(1);
        let mut numbers = after.next()?.split('.').map(|number| number.parse().ok());
        Some(Self::new(numbers.next()??, numbers.next()??, numbers.next()??))
    }

    pub(super) fn is_of_branch(self, other: Self) -> bool {
        (self.major, self.minor) == (other.major, other.minor)
    }
}

impl std::fmt::Display for QemuVersion {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{}.{}.{}", self.major, self.minor, self.micro)
    }
}
