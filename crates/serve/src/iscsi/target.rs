//! Targets: named sets of logical units, and the initiators that may use them.

use std::fmt;
use std::sync::Arc;

use super::scsi::LogicalUnit;
use super::text;
use crate::{Error, Result};

/// Longest name of a target or of an initiator (RFC 7143 section 4.2.7.1).
pub(crate) const NAME_BYTES_MAX: usize = 223;
/// The only portal group: all addresses of the server reach all targets.
pub(crate) const PORTAL_GROUP: u16 = 1;
/// Logical units of one target: their numbers take one byte.
const LUN_COUNT_MAX: usize = 256;

/// The initiators that may use a target.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum InitiatorAccess {
    /// Any.
    #[default]
    Anyone,
    /// Only initiators with one of these names.
    Listed(Vec<String>),
}

impl InitiatorAccess {
    fn admits(&self, initiator: &str) -> bool {
        match self {
            Self::Anyone => true,
            Self::Listed(names) => names.iter().any(|name| name.eq_ignore_ascii_case(initiator)),
        }
    }
}

/// A target.
pub struct Target {
    name: String,
    access: InitiatorAccess,
    units: Vec<Arc<LogicalUnit>>,
}

impl fmt::Debug for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Target")
            .field("name", &self.name)
            .field("unit_count", &self.units.len())
            .finish_non_exhaustive()
    }
}

impl Target {
    /// A target whose logical units have the numbers 0, 1, 2...
    pub fn new(name: &str, access: InitiatorAccess, units: Vec<LogicalUnit>) -> Result<Self> {
        let name = name.to_owned();
        if !is_iscsi_name(&name) {
            return Err(Error::TargetName { name });
        }
        if units.len() > LUN_COUNT_MAX {
            let count = units.len();
            return Err(Error::UnitCount { name, count });
        }
        Ok(Self {
            name,
            access,
            units: units.into_iter().map(Arc::new).collect(),
        })
    }

    /// The iSCSI name.
    pub fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn units(&self) -> &[Arc<LogicalUnit>] {
        &self.units
    }

    pub(crate) fn admits(&self, initiator: &str) -> bool {
        self.access.admits(initiator)
    }

    /// The logical unit that a LUN field addresses, in peripheral or flat space addressing (SAM-5 section 4.7.7).
    pub(crate) fn unit(&self, lun: [u8; 8]) -> Option<&Arc<LogicalUnit>> {
        let [high, low, rest @ ..] = lun;
        let number = match (high >> 6, high & 0x3f) {
            (0, 0) => usize::from(low),
            (1, high) => usize::from(high) << 8 | usize::from(low),
            _ => return None,
        };
        (rest == [0; 6]).then(|| self.units.get(number)).flatten()
    }
}

/// Whether `name` is a valid iSCSI name: `iqn.`, `eui.` or `naa.`, and then only characters that need no normalization.
pub fn is_iscsi_name(name: &str) -> bool {
    let is_valid = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b".-:".contains(&byte);
    let has_type = ["iqn.", "eui.", "naa."].iter().any(|prefix| name.starts_with(prefix));
    has_type && (5..=NAME_BYTES_MAX).contains(&name.len()) && name.bytes().all(is_valid)
}

/// The answer to `SendTargets`: name and address of each target that the initiator may use. `None` if no target has
/// the requested name.
pub(crate) fn send_targets(targets: &[Arc<Target>], request: &SendTargets<'_>) -> Option<Vec<u8>> {
    let mut answer = Vec::new();
    let mut is_known = request.name.is_none();
    for target in targets.iter().filter(|target| target.admits(request.initiator)) {
        if request.name.is_some_and(|name| !target.name.eq_ignore_ascii_case(name)) {
            continue;
        }
        is_known = true;
        text::push(&mut answer, "TargetName", &target.name);
        text::push(
            &mut answer,
            "TargetAddress",
            &format!("{},{PORTAL_GROUP}", request.portal),
        );
    }
    is_known.then_some(answer)
}

/// A request for the list of targets.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SendTargets<'a> {
    /// The requested target; all if `None`.
    pub(crate) name: Option<&'a str>,
    pub(crate) initiator: &'a str,
    /// Address and port at which the initiator has connected.
    pub(crate) portal: &'a str,
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use holdfast_block::MemoryDevice;

    use super::super::scsi::{LogicalUnit, UnitOptions};
    use super::{InitiatorAccess, SendTargets, Target, is_iscsi_name, send_targets};
    use crate::server::export_device::ExportDevice;

    fn unit() -> LogicalUnit {
        let device = ExportDevice::ReadOnly(Arc::new(MemoryDevice::new(4096)));
        LogicalUnit::new(device, UnitOptions::new("serial"))
    }

    #[test]
    fn luns_are_found_in_both_forms_of_addresses() {
        let units = (0..3).map(|_| unit()).collect();
        let target = Target::new("iqn.2026-01.org.example:t", InitiatorAccess::Anyone, units).unwrap();
        for (lun, is_there) in [
            ([0, 0, 0, 0, 0, 0, 0, 0], true),
            ([0, 2, 0, 0, 0, 0, 0, 0], true),
            ([0, 3, 0, 0, 0, 0, 0, 0], false),
            ([0x40, 1, 0, 0, 0, 0, 0, 0], true),
            ([0x41, 1, 0, 0, 0, 0, 0, 0], false),
            ([0xc1, 1, 0, 0, 0, 0, 0, 0], false),
            ([0, 1, 0, 0, 0, 0, 0, 1], false),
        ] {
            assert_eq!(target.unit(lun).is_some(), is_there, "{lun:?}");
        }
    }

    #[test]
    fn initiators_see_only_their_targets() {
        let names = vec!["iqn.2026-01.org.example:a".to_owned()];
        let target = |name, access| Arc::new(Target::new(name, access, vec![unit()]).unwrap());
        let targets = [
            target("iqn.2026-01.org.example:one", InitiatorAccess::Anyone),
            target("iqn.2026-01.org.example:two", InitiatorAccess::Listed(names)),
        ];
        let list = |name, initiator| {
            let request = SendTargets {
                name,
                initiator,
                portal: "10.0.0.1:3260",
            };
            send_targets(&targets, &request)
                .map(|answer| String::from_utf8(answer).unwrap().matches("TargetName").count())
        };
        assert_eq!(list(None, "iqn.2026-01.org.example:A"), Some(2));
        assert_eq!(list(None, "iqn.2026-01.org.example:b"), Some(1));
        assert_eq!(
            list(Some("iqn.2026-01.org.example:two"), "iqn.2026-01.org.example:b"),
            None
        );
        assert_eq!(
            list(Some("iqn.2026-01.org.example:one"), "iqn.2026-01.org.example:b"),
            Some(1)
        );
    }

    #[test]
    fn names_are_checked() {
        for name in [
            "iqn.2026-01.org.example:disk-1",
            "eui.02004567a425678d",
            "naa.52004567ba64678d",
        ] {
            assert!(is_iscsi_name(name), "{name}");
        }
        let long = format!("iqn.{}", "a".repeat(220));
        for name in [
            "",
            "iqn.",
            "disk",
            "iqn.2026-01.org.example:a b",
            "iqn.2026-01.org.example:A",
            &long,
        ] {
            assert!(!is_iscsi_name(name), "{name}");
        }
    }
}
