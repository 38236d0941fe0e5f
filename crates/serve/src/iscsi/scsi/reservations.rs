//! Reservations: persistent ones (SPC-4 section 5.13) and those of RESERVE (SPC-2 section 5.5).
//!
//! A registration belongs to an initiator's port, and survives the session. It does not survive the server: activation
//! through power loss (APTPL) is refused.

use super::super::nexus::{InitiatorPort, Nexus};
use super::cdb::ReservationClass;
use super::sense::{Failure, Sense};

/// Registrations of one logical unit.
const REGISTRATION_COUNT_MAX: usize = 256;

/// Unit attentions of reservations.
pub(crate) const RESERVATIONS_PREEMPTED: u16 = 0x2a03;
pub(crate) const RESERVATIONS_RELEASED: u16 = 0x2a04;
pub(crate) const REGISTRATIONS_PREEMPTED: u16 = 0x2a05;

/// The type of a persistent reservation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReservationType {
    WriteExclusive = 1,
    ExclusiveAccess = 3,
    WriteExclusiveRegistrantsOnly = 5,
    ExclusiveAccessRegistrantsOnly = 6,
    WriteExclusiveAllRegistrants = 7,
    ExclusiveAccessAllRegistrants = 8,
}

impl ReservationType {
    fn of(number: u8) -> Option<Self> {
        Some(match number {
            1 => Self::WriteExclusive,
            3 => Self::ExclusiveAccess,
            5 => Self::WriteExclusiveRegistrantsOnly,
            6 => Self::ExclusiveAccessRegistrantsOnly,
            7 => Self::WriteExclusiveAllRegistrants,
            8 => Self::ExclusiveAccessAllRegistrants,
            _ => return None,
        })
    }

    /// Every registrant holds the reservation.
    fn is_of_all(self) -> bool {
        matches!(
            self,
            Self::WriteExclusiveAllRegistrants | Self::ExclusiveAccessAllRegistrants
        )
    }

    /// Every registrant may read and write.
    fn admits_registrants(self) -> bool {
        !matches!(self, Self::WriteExclusive | Self::ExclusiveAccess)
    }

    fn admits_readers(self) -> bool {
        matches!(
            self,
            Self::WriteExclusive | Self::WriteExclusiveRegistrantsOnly | Self::WriteExclusiveAllRegistrants
        )
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Registration {
    port: InitiatorPort,
    key: u64,
}

/// A persistent reservation. Reservations of all registrants have the port that made them only for information.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Reservation {
    holder: InitiatorPort,
    kind: ReservationType,
}

/// The reservations of a logical unit.
#[derive(Debug, Default)]
pub(crate) struct Reservations {
    generation: u32,
    registrations: Vec<Registration>,
    reservation: Option<Reservation>,
    /// The nexus that has reserved the unit by RESERVE.
    legacy: Option<u64>,
}

/// The parameters of PERSISTENT RESERVE OUT.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ReserveOut {
    pub(crate) action: u8,
    pub(crate) scope_and_type: u8,
    pub(crate) key: u64,
    pub(crate) action_key: u64,
    /// SPEC_I_PT, ALL_TG_PT and APTPL.
    pub(crate) flags: u8,
}

/// Effects of a change on other initiators.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct ReservationEffects {
    /// Unit attentions for all sessions of these ports.
    pub(crate) attentions: Vec<(InitiatorPort, u16)>,
    /// Ports whose tasks are aborted.
    pub(crate) aborted: Vec<InitiatorPort>,
}

impl Reservations {
    /// Whether a command of `nexus` conflicts with a reservation.
    pub(crate) fn conflicts(&self, nexus: &Nexus, class: ReservationClass) -> bool {
        if class == ReservationClass::Free {
            return false;
        }
        if self.legacy.is_some_and(|holder| holder != nexus.id) {
            return true;
        }
        let Some(reservation) = &self.reservation else {
            return false;
        };
        let is_admitted = self.holds(&nexus.port)
            || (reservation.kind.admits_registrants() && self.registration(&nexus.port).is_some());
        match class {
            ReservationClass::Free | ReservationClass::Persistent => false,
            ReservationClass::Read => !is_admitted && !reservation.kind.admits_readers(),
            ReservationClass::Change => !is_admitted,
        }
    }

    fn registration(&self, port: &InitiatorPort) -> Option<&Registration> {
        self.registrations.iter().find(|one| one.port == *port)
    }

    fn holds(&self, port: &InitiatorPort) -> bool {
        self.reservation.as_ref().is_some_and(|reservation| {
            if reservation.kind.is_of_all() {
                self.registration(port).is_some()
            } else {
                reservation.holder == *port
            }
        })
    }

    /// RESERVE.
    pub(crate) fn reserve_legacy(&mut self, nexus: &Nexus) -> Result<(), Failure> {
        if !self.registrations.is_empty() {
            return Err(Failure::Reserved);
        }
        self.legacy = Some(nexus.id);
        Ok(())
    }

    /// RELEASE; has no effect for other nexuses than the holder.
    pub(crate) fn release_legacy(&mut self, nexus: u64) {
        self.legacy.take_if(|holder| *holder == nexus);
    }

    /// A reset of the logical unit: persistent reservations stay.
    pub(crate) fn reset(&mut self) {
        self.legacy = None;
    }

    /// PERSISTENT RESERVE OUT.
    pub(crate) fn change(&mut self, port: &InitiatorPort, out: &ReserveOut) -> Result<ReservationEffects, Failure> {
        const APTPL: u8 = 1;
        const SPEC_I_PT: u8 = 8;
        if self.legacy.is_some() {
            return Err(Failure::Reserved);
        }
        let is_registration = matches!(out.action, 0 | 6);
        if is_registration && out.flags & (APTPL | SPEC_I_PT) != 0 {
            return Err(Sense::INVALID_FIELD_IN_PARAMETERS.into());
        }
        if !is_registration && self.registration(port).is_none_or(|one| one.key != out.key) {
            return Err(Failure::Reserved);
        }
        match out.action {
            0 | 6 => self.register(port, out),
            1 => self.reserve(port, out),
            2 => self.release(port, out),
            3 => Ok(self.clear(port)),
            _ => self.preempt(port, out),
        }
    }

    fn register(&mut self, port: &InitiatorPort, out: &ReserveOut) -> Result<ReservationEffects, Failure> {
        let is_checked = out.action == 0;
        let known = self.registrations.iter_mut().find(|one| one.port == *port);
        if let Some(registration) = known {
            if is_checked && registration.key != out.key {
                return Err(Failure::Reserved);
            }
            registration.key = out.action_key;
            self.generation = self.generation.wrapping_add(1);
            return Ok(if out.action_key == 0 {
                self.unregister(port)
            } else {
                ReservationEffects::default()
            });
        }
        if is_checked && out.key != 0 {
            return Err(Failure::Reserved);
        }
        if out.action_key == 0 {
            return Ok(ReservationEffects::default());
        }
        if self.registrations.len() >= REGISTRATION_COUNT_MAX {
            return Err(Sense::INSUFFICIENT_REGISTRATIONS.into());
        }
        self.generation = self.generation.wrapping_add(1);
        self.registrations.push(Registration {
            port: port.clone(),
            key: out.action_key,
        });
        Ok(ReservationEffects::default())
    }

    /// Removes a registration, and the reservation if no holder is left.
    fn unregister(&mut self, port: &InitiatorPort) -> ReservationEffects {
        self.registrations.retain(|one| one.port != *port);
        let Some(reservation) = &self.reservation else {
            return ReservationEffects::default();
        };
        let kind = reservation.kind;
        let is_over = if kind.is_of_all() {
            self.registrations.is_empty()
        } else {
            reservation.holder == *port
        };
        if !is_over {
            return ReservationEffects::default();
        }
        self.reservation = None;
        if kind.admits_registrants() {
            self.attentions_for_others(port, RESERVATIONS_RELEASED)
        } else {
            ReservationEffects::default()
        }
    }

    fn attentions_for_others(&self, port: &InitiatorPort, code: u16) -> ReservationEffects {
        let others = self.registrations.iter().filter(|one| one.port != *port);
        ReservationEffects {
            attentions: others.map(|one| (one.port.clone(), code)).collect(),
            aborted: Vec::new(),
        }
    }

    fn reserve(&mut self, port: &InitiatorPort, out: &ReserveOut) -> Result<ReservationEffects, Failure> {
        let kind = reservation_type(out)?;
        match &self.reservation {
            Some(reservation) if reservation.kind != kind || !self.holds(port) => return Err(Failure::Reserved),
            Some(_) => {}
            None => {
                self.reservation = Some(Reservation {
                    holder: port.clone(),
                    kind,
                });
            }
        }
        Ok(ReservationEffects::default())
    }

    fn release(&mut self, port: &InitiatorPort, out: &ReserveOut) -> Result<ReservationEffects, Failure> {
        if !self.holds(port) {
            return Ok(ReservationEffects::default());
        }
        let kind = reservation_type(out)?;
        if self
            .reservation
            .as_ref()
            .is_some_and(|reservation| reservation.kind != kind)
        {
            return Err(Sense::INVALID_RELEASE.into());
        }
        self.reservation = None;
        Ok(if kind.admits_registrants() {
            self.attentions_for_others(port, RESERVATIONS_RELEASED)
        } else {
            ReservationEffects::default()
        })
    }

    fn clear(&mut self, port: &InitiatorPort) -> ReservationEffects {
        let effects = self.attentions_for_others(port, RESERVATIONS_PREEMPTED);
        self.generation = self.generation.wrapping_add(1);
        self.registrations.clear();
        self.reservation = None;
        effects
    }

    /// PREEMPT, and PREEMPT AND ABORT.
    fn preempt(&mut self, port: &InitiatorPort, out: &ReserveOut) -> Result<ReservationEffects, Failure> {
        let before = self.reservation.clone();
        let is_of_all = before.as_ref().is_some_and(|reservation| reservation.kind.is_of_all());
        if out.action_key == 0 && !is_of_all {
            return Err(Sense::INVALID_FIELD_IN_PARAMETERS.into());
        }
        let is_addressed = |one: &Registration| out.action_key == 0 || one.key == out.action_key;
        if !self.registrations.iter().any(is_addressed) {
            return Err(Failure::Reserved);
        }
        let takes_reservation = match &before {
            None => false,
            Some(_) if is_of_all => out.action_key == 0,
            Some(reservation) => self.registration(&reservation.holder).is_some_and(is_addressed),
        };
        let after = if takes_reservation {
            Some(Reservation {
                holder: port.clone(),
                kind: reservation_type(out)?,
            })
        } else {
            before.clone()
        };
        self.generation = self.generation.wrapping_add(1);
        let (removed, kept): (Vec<_>, Vec<_>) = std::mem::take(&mut self.registrations)
            .into_iter()
            .partition(|one| one.port != *port && is_addressed(one));
        self.registrations = kept;
        let mut effects = match (&before, &after) {
            (Some(before), Some(after)) if takes_reservation && before.kind != after.kind => {
                self.attentions_for_others(port, RESERVATIONS_RELEASED)
            }
            _ => ReservationEffects::default(),
        };
        self.reservation = after;
        for registration in removed {
            if out.action == 5 {
                effects.aborted.push(registration.port.clone());
            }
            effects.attentions.push((registration.port, REGISTRATIONS_PREEMPTED));
        }
        Ok(effects)
    }

    /// PERSISTENT RESERVE IN: the parameter data of a service action.
    pub(crate) fn report(&self, action: u8) -> Vec<u8> {
        let mut data = self.generation.to_be_bytes().to_vec();
        let mut list = Vec::new();
        match action {
            0 => list.extend(self.registrations.iter().flat_map(|one| one.key.to_be_bytes())),
            1 => {
                if let Some(reservation) = &self.reservation {
                    let key = if reservation.kind.is_of_all() {
                        0
                    } else {
                        self.registration(&reservation.holder).map_or(0, |one| one.key)
                    };
                    list.extend(key.to_be_bytes());
                    list.extend([0, 0, 0, 0, 0, reservation.kind as u8, 0, 0]);
                }
            }
            2 => {
                // Compatible reservation handling, specified initiator ports, all target ports and persistence are off.
                // The type mask is valid, and has all types.
                return vec![0, 8, 0, 0x80, 0xea, 0x01, 0, 0];
            }
            _ => {
                for registration in &self.registrations {
                    list.extend(self.full_status(registration));
                }
            }
        }
        data.extend(u32::try_from(list.len()).unwrap_or(u32::MAX).to_be_bytes());
        data.extend(list);
        data
    }

    fn full_status(&self, registration: &Registration) -> Vec<u8> {
        let mut descriptor = registration.key.to_be_bytes().to_vec();
        let held = self.reservation.as_ref().filter(|_| self.holds(&registration.port));
        let (flags, kind) = held.map_or((0, 0), |reservation| (1, reservation.kind as u8));
        // The last field is the relative target port: 1 is the only port.
        descriptor.extend([0, 0, 0, 0, flags, kind, 0, 0, 0, 0, 0, 1]);
        let id = registration.port.transport_id();
        descriptor.extend(u32::try_from(id.len()).unwrap_or(u32::MAX).to_be_bytes());
        descriptor.extend(id);
        descriptor
    }
}

/// The type of a reservation of the whole logical unit.
fn reservation_type(out: &ReserveOut) -> Result<ReservationType, Failure> {
    let kind = ReservationType::of(out.scope_and_type & 0x0f);
    kind.filter(|_| out.scope_and_type >> 4 == 0)
        .ok_or(Failure::Check(Sense::INVALID_FIELD_IN_CDB))
}

#[cfg(test)]
mod tests {
    use super::super::super::nexus::{InitiatorPort, Nexus};
    use super::super::cdb::ReservationClass;
    use super::super::sense::{Failure, Sense};
    use super::{
        REGISTRATIONS_PREEMPTED, RESERVATIONS_PREEMPTED, RESERVATIONS_RELEASED, ReservationEffects, Reservations,
        ReserveOut,
    };

    fn nexus(id: u8) -> Nexus {
        Nexus {
            id: u64::from(id),
            port: InitiatorPort {
                name: format!("iqn.2026-01.org.example:{id}"),
                session_id: [id; 6],
            },
        }
    }

    type Changed = Result<ReservationEffects, Failure>;

    fn out(reservations: &mut Reservations, of: u8, action: u8, kind: u8, key: u64, action_key: u64) -> Changed {
        let out = ReserveOut {
            action,
            scope_and_type: kind,
            key,
            action_key,
            flags: 0,
        };
        reservations.change(&nexus(of).port, &out)
    }

    const CONFLICT: Changed = Err(Failure::Reserved);
    const QUIET: Changed = Ok(ReservationEffects {
        attentions: Vec::new(),
        aborted: Vec::new(),
    });

    fn attentions(changed: Changed) -> Vec<(u8, u16)> {
        let effects = changed.unwrap();
        effects
            .attentions
            .iter()
            .map(|(port, code)| (port.session_id[0], *code))
            .collect()
    }

    /// A unit on which ports 1 and 2 are registered with the keys 11 and 22.
    fn registered() -> Reservations {
        let mut reservations = Reservations::default();
        assert_eq!(out(&mut reservations, 1, 0, 0, 0, 11), QUIET);
        assert_eq!(out(&mut reservations, 2, 6, 0, 99, 22), QUIET);
        reservations
    }

    #[test]
    fn registrations_are_checked_by_their_keys() {
        let mut reservations = registered();
        assert_eq!(out(&mut reservations, 3, 0, 0, 5, 33), CONFLICT);
        assert_eq!(out(&mut reservations, 1, 0, 0, 5, 12), CONFLICT);
        assert_eq!(out(&mut reservations, 1, 0, 0, 11, 12), QUIET);
        assert_eq!(
            reservations.report(0),
            [
                &[0, 0, 0, 3, 0, 0, 0, 16][..],
                &12_u64.to_be_bytes(),
                &22_u64.to_be_bytes()
            ]
            .concat()
        );
        assert_eq!(out(&mut reservations, 1, 0, 0, 12, 0), QUIET);
        assert_eq!(
            out(&mut reservations, 1, 1, 1, 12, 0),
            CONFLICT,
            "it is not registered any more"
        );
        let flags = ReserveOut {
            action: 0,
            scope_and_type: 0,
            key: 0,
            action_key: 1,
            flags: 1,
        };
        assert_eq!(
            reservations.change(&nexus(4).port, &flags),
            Err(Failure::Check(Sense::INVALID_FIELD_IN_PARAMETERS)),
            "persistence through power loss is not offered"
        );
    }

    #[test]
    fn each_type_admits_whom_the_standard_admits() {
        use ReservationClass::{Change, Free, Persistent, Read};
        // Type; and for the holder, a registrant and a stranger: may read, may write.
        for (kind, expected) in [
            (1, [(true, true), (true, false), (true, false)]),
            (3, [(true, true), (false, false), (false, false)]),
            (5, [(true, true), (true, true), (true, false)]),
            (6, [(true, true), (true, true), (false, false)]),
            (7, [(true, true), (true, true), (true, false)]),
            (8, [(true, true), (true, true), (false, false)]),
        ] {
            let mut reservations = registered();
            assert_eq!(out(&mut reservations, 1, 1, kind, 11, 0), QUIET);
            for (of, (reads, writes)) in (1..).zip(expected) {
                let may = |class| !reservations.conflicts(&nexus(of), class);
                assert_eq!((may(Read), may(Change)), (reads, writes), "type {kind}, port {of}");
                assert!(may(Free) && may(Persistent));
            }
            let second = out(&mut reservations, 2, 1, kind, 22, 0);
            assert_eq!(second, if kind > 6 { QUIET } else { CONFLICT }, "type {kind}");
        }
        for wrong in [0, 2, 4, 9, 0x11] {
            let done = out(&mut registered(), 1, 1, wrong, 11, 0);
            assert_eq!(done, Err(Failure::Check(Sense::INVALID_FIELD_IN_CDB)), "type {wrong}");
        }
    }

    #[test]
    fn a_release_needs_the_holder_and_the_type() {
        let mut reservations = registered();
        out(&mut reservations, 1, 1, 5, 11, 0).unwrap();
        assert_eq!(out(&mut reservations, 2, 2, 5, 22, 0), QUIET, "it holds nothing");
        assert_eq!(
            out(&mut reservations, 1, 2, 6, 11, 0),
            Err(Failure::Check(Sense::INVALID_RELEASE))
        );
        assert_eq!(
            attentions(out(&mut reservations, 1, 2, 5, 11, 0)),
            [(2, RESERVATIONS_RELEASED)]
        );
        out(&mut reservations, 1, 1, 1, 11, 0).unwrap();
        assert_eq!(
            attentions(out(&mut reservations, 1, 2, 1, 11, 0)),
            [],
            "no registrant had access through it"
        );
    }

    #[test]
    fn a_reservation_ends_with_its_last_holder() {
        for (kind, ends, expected) in [
            (1, true, vec![]),
            (5, true, vec![(2, RESERVATIONS_RELEASED)]),
            (8, false, vec![]),
        ] {
            let mut reservations = registered();
            out(&mut reservations, 1, 1, kind, 11, 0).unwrap();
            assert_eq!(attentions(out(&mut reservations, 1, 0, 0, 11, 0)), expected);
            assert_eq!(reservations.report(1).len() == 8, ends, "type {kind}");
            out(&mut reservations, 2, 0, 0, 22, 0).unwrap();
            assert_eq!(reservations.report(1).len(), 8);
        }
    }

    #[test]
    fn preempting_removes_registrations_and_takes_the_reservation() {
        let mut reservations = registered();
        assert_eq!(
            out(&mut reservations, 2, 4, 3, 22, 33),
            CONFLICT,
            "there is no such key"
        );
        assert_eq!(
            out(&mut reservations, 2, 4, 3, 22, 0),
            Err(Failure::Check(Sense::INVALID_FIELD_IN_PARAMETERS))
        );
        assert_eq!(
            attentions(out(&mut reservations, 2, 4, 3, 22, 11)),
            [(1, REGISTRATIONS_PREEMPTED)]
        );
        assert_eq!(reservations.report(1).len(), 8, "there was no reservation to take");
        let mut reservations = registered();
        out(&mut reservations, 1, 1, 1, 11, 0).unwrap();
        let effects = out(&mut reservations, 2, 5, 3, 22, 11).unwrap();
        assert_eq!(effects.aborted, [nexus(1).port]);
        assert_eq!(
            &reservations.report(1)[8..],
            [0, 0, 0, 0, 0, 0, 0, 22, 0, 0, 0, 0, 0, 3, 0, 0]
        );
        let mut reservations = registered();
        out(&mut reservations, 1, 1, 8, 11, 0).unwrap();
        assert_eq!(
            attentions(out(&mut reservations, 2, 4, 1, 22, 0)),
            [(1, REGISTRATIONS_PREEMPTED)]
        );
        assert!(reservations.conflicts(&nexus(1), ReservationClass::Change));
    }

    #[test]
    fn clearing_tells_the_other_registrants() {
        let mut reservations = registered();
        out(&mut reservations, 1, 1, 5, 11, 0).unwrap();
        assert_eq!(out(&mut reservations, 2, 3, 0, 11, 0), CONFLICT);
        assert_eq!(
            attentions(out(&mut reservations, 2, 3, 0, 22, 0)),
            [(1, RESERVATIONS_PREEMPTED)]
        );
        assert_eq!(reservations.report(0), [0, 0, 0, 3, 0, 0, 0, 0]);
    }

    #[test]
    fn full_status_names_the_ports() {
        let mut reservations = registered();
        out(&mut reservations, 2, 1, 3, 22, 0).unwrap();
        let report = reservations.report(3);
        let length = usize::from(report[7]);
        assert_eq!(report.len(), 8 + length);
        assert_eq!(length % 4, 0);
        let holders: Vec<_> = report[8..]
            .chunks(length / 2)
            .map(|one| (one[7], one[12], one[13], one[19]))
            .collect();
        assert_eq!(holders, [(11, 0, 0, 1), (22, 1, 3, 1)]);
        let text = String::from_utf8_lossy(&report);
        assert!(text.contains("iqn.2026-01.org.example:2,i,0x020202020202\0"), "{text}");
    }

    #[test]
    fn reserve_excludes_everybody_and_persistent_reservations_exclude_it() {
        let mut reservations = Reservations::default();
        reservations.reserve_legacy(&nexus(1)).unwrap();
        assert!(!reservations.conflicts(&nexus(1), ReservationClass::Change));
        assert!(reservations.conflicts(&nexus(2), ReservationClass::Persistent));
        assert_eq!(out(&mut reservations, 1, 6, 0, 0, 1), CONFLICT);
        reservations.release_legacy(2);
        assert!(reservations.conflicts(&nexus(2), ReservationClass::Read));
        reservations.reset();
        assert!(!reservations.conflicts(&nexus(2), ReservationClass::Read));
        out(&mut reservations, 1, 6, 0, 0, 1).unwrap();
        assert_eq!(reservations.reserve_legacy(&nexus(2)), Err(Failure::Reserved));
    }
}
