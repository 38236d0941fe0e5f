//! Targets: named sets of logical units, and the initiators that may use them.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use super::nexus::Nexus;
use super::scsi::{LUNS_CHANGED, LogicalUnit};
use super::text;
use crate::registry::{ClientEntry, ClientHandle, ClientSession};
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

/// A target. Its logical units change while sessions use it.
pub struct Target {
    name: String,
    access: InitiatorAccess,
    state: RwLock<TargetState>,
}

struct TargetState {
    units: BTreeMap<u8, Arc<LogicalUnit>>,
    /// The numbers of the units, in order.
    numbers: Arc<[u8]>,
    sessions: BTreeMap<u64, KnownSession>,
    /// Its last unit was removed: no session can begin.
    is_removed: bool,
}

/// A session with a target.
pub(crate) struct EnteredSession {
    pub(crate) nexus: Nexus,
    pub(crate) entry: ClientEntry,
    pub(crate) ending: Arc<dyn ClientSession>,
}

/// A session, and its places among the clients of exports.
struct KnownSession {
    session: EnteredSession,
    places: BTreeMap<u8, ClientHandle>,
}

/// Whether a session uses a unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum UnitUse {
    Entered,
    /// The export of the unit is being removed.
    Refused,
}

impl KnownSession {
    fn enter(&mut self, number: u8, unit: &LogicalUnit) -> UnitUse {
        unit.enter(&self.session.nexus);
        let Some(export) = unit.registered() else {
            return UnitUse::Entered;
        };
        match export.enter(self.session.entry.clone(), Arc::clone(&self.session.ending)) {
            Some(place) => {
                self.places.insert(number, place);
                UnitUse::Entered
            }
            None => UnitUse::Refused,
        }
    }
}

/// The units of a target after one was removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum UnitsLeft {
    Some,
    None,
}

impl fmt::Debug for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Target")
            .field("name", &self.name)
            .field("unit_count", &self.read().units.len())
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
        let units: BTreeMap<u8, _> = (0..=u8::MAX).zip(units.into_iter().map(Arc::new)).collect();
        let state = TargetState {
            numbers: units.keys().copied().collect(),
            units,
            sessions: BTreeMap::new(),
            is_removed: false,
        };
        Ok(Self {
            name,
            access,
            state: RwLock::new(state),
        })
    }

    /// The iSCSI name.
    pub fn name(&self) -> &str {
        &self.name
    }

    fn read(&self) -> RwLockReadGuard<'_, TargetState> {
        self.state.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, TargetState> {
        self.state.write().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn units(&self) -> Vec<Arc<LogicalUnit>> {
        self.read().units.values().cloned().collect()
    }

    /// The numbers of its units, in order.
    pub(crate) fn unit_numbers(&self) -> Arc<[u8]> {
        Arc::clone(&self.read().numbers)
    }

    pub(crate) fn admits(&self, initiator: &str) -> bool {
        self.access.admits(initiator)
    }

    /// The logical unit that a LUN field addresses, in peripheral or flat space addressing (SAM-5 section 4.7.7).
    pub(crate) fn unit(&self, lun: [u8; 8]) -> Option<Arc<LogicalUnit>> {
        let [high, low, rest @ ..] = lun;
        let number = match (high >> 6, high & 0x3f) {
            (0, 0) => u16::from(low),
            (1, high) => u16::from(high) << 8 | u16::from(low),
            _ => return None,
        };
        let number = u8::try_from(number).ok().filter(|_| rest == [0; 6])?;
        self.read().units.get(&number).cloned()
    }

    /// Begins a session with all units; `false` if the target was removed, or is being removed with its last unit: the
    /// removal would not find the session among the clients of that unit, and not end it. The caller
    /// [leaves](Self::leave) in both cases.
    pub(crate) fn enter(&self, session: EnteredSession) -> bool {
        let mut state = self.write();
        if state.is_removed {
            return false;
        }
        let id = session.nexus.id;
        let mut known = KnownSession {
            session,
            places: BTreeMap::new(),
        };
        let mut has_unit = state.units.is_empty();
        for (number, unit) in &state.units {
            has_unit |= known.enter(*number, unit) == UnitUse::Entered;
        }
        if has_unit {
            state.sessions.insert(id, known);
        }
        has_unit
    }

    /// Ends a session: all that belongs to it ends, too.
    pub(crate) fn leave(&self, nexus: &Nexus) {
        let mut state = self.write();
        let left = state.sessions.remove(&nexus.id);
        for unit in state.units.values() {
            unit.leave(nexus);
        }
        drop(state);
        drop(left);
    }

    /// Adds a unit with the first free number, which it returns. Sessions that exist learn of it.
    pub(crate) fn add_unit(&self, unit: LogicalUnit) -> Result<u8> {
        let mut state = self.write();
        let free = (0..=u8::MAX).find(|number| !state.units.contains_key(number));
        let Some(number) = free else {
            let name = self.name.clone();
            let count = LUN_COUNT_MAX + 1;
            return Err(Error::UnitCount { name, count });
        };
        state.units.values().for_each(|unit| unit.raise_attention(LUNS_CHANGED));
        let TargetState {
            units,
            sessions,
            numbers,
            ..
        } = &mut *state;
        for session in sessions.values_mut() {
            session.enter(number, &unit);
        }
        units.insert(number, Arc::new(unit));
        *numbers = units.keys().copied().collect();
        Ok(number)
    }

    /// Removes a unit. Sessions with other units continue, and learn of it. With its last unit, the target is removed:
    /// the caller ends its sessions.
    pub(crate) fn remove_unit(&self, number: u8) -> UnitsLeft {
        let mut state = self.write();
        let TargetState {
            units,
            sessions,
            numbers,
            ..
        } = &mut *state;
        let removed = units.remove(&number);
        *numbers = units.keys().copied().collect();
        if units.is_empty() {
            state.is_removed = true;
            if removed.is_some_and(|unit| unit.registered().is_some()) {
                end_sessions_without(number, &state.sessions);
            }
            return UnitsLeft::None;
        }
        let left: Vec<_> = sessions
            .values_mut()
            .map(|session| session.places.remove(&number))
            .collect();
        for unit in units.values() {
            unit.raise_attention(LUNS_CHANGED);
        }
        drop(state);
        drop(left);
        UnitsLeft::Some
    }
}

/// Ends sessions that are not among the clients of the last unit, because they began while it was being removed.
fn end_sessions_without(number: u8, sessions: &BTreeMap<u64, KnownSession>) {
    let without = sessions.values().filter(|known| !known.places.contains_key(&number));
    without.for_each(|known| known.session.ending.cut());
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
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    use holdfast_block::{MemoryDevice, SystemClock};

    use super::super::nexus::{InitiatorPort, Nexus};
    use super::super::scsi::{LogicalUnit, UnitOptions};
    use super::{EnteredSession, InitiatorAccess, SendTargets, Target, UnitsLeft, is_iscsi_name, send_targets};
    use crate::registry::{ClientEntry, ClientProtocol, ClientSession, ExportOptions, Registry, Removal};
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

    struct TestEnding(AtomicUsize);

    impl ClientSession for TestEnding {
        fn ask_to_end(&self) {}

        fn cut(&self) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn session(ending: &Arc<TestEnding>) -> EnteredSession {
        EnteredSession {
            nexus: Nexus {
                id: 7,
                port: InitiatorPort {
                    name: "iqn.2026-01.org.example:a".to_owned(),
                    session_id: [0; 6],
                },
            },
            entry: ClientEntry {
                protocol: ClientProtocol::Iscsi,
                peer: "10.0.0.1:1".to_owned(),
                name: None,
                since: Duration::ZERO,
            },
            ending: Arc::clone(ending) as _,
        }
    }

    /// An initiator that logged in while the last unit was being removed kept a session without units for ever.
    #[test]
    fn no_session_begins_while_the_last_unit_is_removed() {
        let registry = Registry::default();
        let device = ExportDevice::ReadOnly(Arc::new(MemoryDevice::new(4096)));
        let export = registry.add(ExportOptions::new("a", device)).unwrap();
        let unit = LogicalUnit::of(&export, UnitOptions::new("serial"));
        let target = Target::new("iqn.2026-01.org.example:t", InitiatorAccess::Anyone, vec![unit]);
        let target = Arc::new(target.unwrap());
        let ending = Arc::new(TestEnding(AtomicUsize::new(0)));
        let (late, theirs) = (Arc::clone(&target), Arc::clone(&ending));
        // Called when the export has no more clients, and the target still has the unit.
        export.on_removal(move || {
            assert!(!late.enter(session(&theirs)), "the login is refused");
            assert_eq!(late.remove_unit(0), UnitsLeft::None);
        });
        registry.remove("a", Removal::IfUnused, &SystemClock::new()).unwrap();
    }

    /// Such a session of a target with two units lasts until the second one is removed.
    #[test]
    fn a_session_without_a_place_in_the_last_unit_is_ended() {
        let registry = Registry::default();
        let units = ["a", "b"].map(|name| {
            let device = ExportDevice::ReadOnly(Arc::new(MemoryDevice::new(4096)));
            let export = registry.add(ExportOptions::new(name, device)).unwrap();
            LogicalUnit::of(&export, UnitOptions::new(name))
        });
        let target = Target::new("iqn.2026-01.org.example:t", InitiatorAccess::Anyone, units.into());
        let target = Arc::new(target.unwrap());
        let ending = Arc::new(TestEnding(AtomicUsize::new(0)));
        let (late, theirs) = (Arc::clone(&target), Arc::clone(&ending));
        registry.find("a").unwrap().on_removal(move || {
            assert!(late.enter(session(&theirs)), "the other unit can be used");
            assert_eq!(late.remove_unit(1), UnitsLeft::Some);
            assert_eq!(theirs.0.load(Ordering::Relaxed), 0);
            assert_eq!(late.remove_unit(0), UnitsLeft::None);
        });
        registry.remove("a", Removal::IfUnused, &SystemClock::new()).unwrap();
        assert_eq!(ending.0.load(Ordering::Relaxed), 1);
    }
}
