//! Which QEMU it is, and what follows from that.

use serde_json::Value;

use crate::qmp::{Monitor, MonitorError, QmpCommand, Result};

const COMMAND: &str = "query-version";

/// A version of QEMU; the later is the greater.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct QemuVersion {
    /// The first number.
    pub major: u64,
    /// The second number.
    pub minor: u64,
}

impl QemuVersion {
    /// Asks a QEMU.
    pub fn query(monitor: &dyn Monitor) -> Result<Self> {
        let answer = monitor.execute(&QmpCommand::new(COMMAND, Value::Null))?;
        let number = |key: &str| answer.pointer(&format!("/qemu/{key}")).and_then(Value::as_u64);
        match (number("major"), number("minor")) {
            (Some(major), Some(minor)) => Ok(Self { major, minor }),
            _ => Err(MonitorError::Senseless {
                command: COMMAND.to_owned(),
                detail: "there are no numbers".to_owned(),
            }),
        }
    }

    /// Whether its copy-before-write filter gives the copy up rather than the guest: `on-cbw-error` and `cbw-timeout` are in 7.1 and
    /// later.
    pub fn has_harmless_filter(self) -> bool {
        self >= Self { major: 7, minor: 1 }
    }

    /// Whether the memory of a machine that it emulates can be sent while the machine runs.
    pub(crate) fn sends_all_that_it_emulates(self) -> bool {
        self >= Self { major: 9, minor: 0 }
    }
}

impl std::fmt::Display for QemuVersion {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{}.{}", self.major, self.minor)
    }
}

#[cfg(test)]
mod tests {
    use super::QemuVersion;

    #[test]
    fn filters_are_harmless_since_7_1() {
        let version = |major, minor| QemuVersion { major, minor };
        assert!(version(7, 1).has_harmless_filter() && version(10, 0).has_harmless_filter());
        assert!(!version(7, 0).has_harmless_filter() && !version(6, 2).has_harmless_filter());
        assert_eq!(version(7, 2).to_string(), "7.2");
    }
}
