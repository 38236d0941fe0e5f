//! Units that are added and removed while initiators use the target.

use std::sync::Arc;
use std::time::Duration;

use holdfast_block::{Clock as _, MemoryDevice, SystemClock};
use holdfast_serve::iscsi::{
    Authentication, ExportDevice, InitiatorAccess, Limits, LogicalUnit, TargetSet, UnitOptions,
};
use holdfast_serve::registry::{ExportOptions, RegisteredExport, Registry, RegistryError, Removal};

use crate::initiator::{Answer, Data, Initiator, RawPdu};
use crate::targets::{TARGET, TestTarget, device, start_set};

const ATTENTION: u8 = 6;
const LUNS_CHANGED: u16 = 0x3f0e;
const POWER_ON: u16 = 0x2900;
const NO_SUCH_UNIT: (u8, u16) = (5, 0x2500);

struct ServedUnits {
    registry: Registry,
    targets: Arc<TargetSet>,
    server: TestTarget,
    clock: SystemClock,
}

impl ServedUnits {
    fn start(names: &[&str]) -> Self {
        let targets = Arc::new(TargetSet::default());
        let served = Self {
            registry: Registry::default(),
            server: start_set(Arc::clone(&targets), device(), Authentication::None, Limits::default()),
            targets,
            clock: SystemClock::new(),
        };
        for (number, name) in names.iter().enumerate() {
            assert_eq!(usize::from(served.add(name)), number);
        }
        served
    }

    fn add(&self, name: &str) -> u8 {
        let device = ExportDevice::Writable(Arc::new(MemoryDevice::new(1 << 20)));
        let export = self.registry.add(ExportOptions::new(name, device)).unwrap();
        let unit = LogicalUnit::of(&export, UnitOptions::new(name));
        let position = self.targets.add_unit(TARGET, &InitiatorAccess::Anyone, unit).unwrap();
        let (targets, place) = (Arc::clone(&self.targets), position.clone());
        export.on_removal(move || targets.remove_unit(&place));
        position.number
    }

    fn export(&self, name: &str) -> Arc<RegisteredExport> {
        self.registry.find(name).unwrap()
    }

    fn remove(&self, name: &str, patience_ms: u64) {
        let patience = Duration::from_millis(patience_ms);
        self.registry
            .remove(name, Removal::Forced { patience }, &self.clock)
            .unwrap();
    }

    fn log_in(&self) -> Initiator {
        let mut initiator = Initiator::connect(&self.server);
        initiator.log_in(TARGET, &["ImmediateData=Yes"]);
        initiator
    }
}

fn sense(initiator: &mut Initiator, lun: u8) -> Option<(u8, u16)> {
    initiator.command(lun, &[0; 6], Data::None).sense
}

/// The numbers of REPORT LUNS.
fn luns(initiator: &mut Initiator) -> Vec<u8> {
    let cdb = [0xa0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0];
    let data = initiator.command(0, &cdb, Data::In(256)).data;
    data[8..].chunks(8).map(|lun| lun[1]).collect()
}

#[test]
fn sessions_continue_while_other_units_come_and_go() {
    let served = ServedUnits::start(&["a", "b"]);
    let mut initiator = served.log_in();
    for lun in 0..2 {
        assert_eq!(sense(&mut initiator, lun), Some((ATTENTION, POWER_ON)));
    }
    let clients = served.export("b").clients();
    assert_eq!(clients[0].name.as_deref(), Some("iqn.2026-01.org.example:initiator"));
    assert_eq!(served.add("c"), 2);
    assert_eq!(sense(&mut initiator, 0), Some((ATTENTION, LUNS_CHANGED)));
    assert_eq!(sense(&mut initiator, 1), Some((ATTENTION, LUNS_CHANGED)));
    assert_eq!(sense(&mut initiator, 2), Some((ATTENTION, POWER_ON)));
    assert_eq!(served.export("c").clients().len(), 1, "the session uses it");
    let refused = served.registry.remove("b", Removal::IfUnused, &served.clock);
    assert!(matches!(refused, Err(RegistryError::InUse { client_count: 1, .. })));
    served.remove("b", 1000);
    assert_eq!(sense(&mut initiator, 1), Some(NO_SUCH_UNIT));
    assert_eq!(sense(&mut initiator, 0), Some((ATTENTION, LUNS_CHANGED)));
    assert_eq!(luns(&mut initiator), [0, 2], "numbers are not shifted");
    assert_eq!(initiator.command(0, &[0; 6], Data::None), Answer::default());
    let data = [7; 512];
    let write = initiator.command(0, &[0x2a, 0, 0, 0, 0, 1, 0, 0, 1, 0], Data::Out(&data));
    assert_eq!(write, Answer::default());
    assert_eq!(served.export("a").traffic().write_bytes, 512);
    assert_eq!(served.add("d"), 1, "the first free number");
}

#[test]
fn initiators_are_asked_to_log_out_when_the_last_unit_goes() {
    const LOGOUT: u8 = 0x46;
    let served = ServedUnits::start(&["a"]);
    let mut initiator = served.log_in();
    assert_eq!(sense(&mut initiator, 0), Some((ATTENTION, POWER_ON)));
    std::thread::scope(|scope| {
        let removal = scope.spawn(|| served.remove("a", 10_000));
        let message = initiator.receive().unwrap();
        assert_eq!(
            (message.opcode(), message.header[36]),
            (0x32, 1),
            "target requests logout"
        );
        let logout = RawPdu::new(LOGOUT, 0x80, 77).with_u32(24, initiator.command_number);
        initiator.send(&logout);
        assert_eq!(initiator.receive().unwrap().opcode(), 0x26);
        removal.join().unwrap();
    });
    assert!(
        served.clock.now() < Duration::from_secs(9),
        "the removal did not wait for a timeout"
    );
    let mut late = Initiator::connect(&served.server);
    let text = format!("InitiatorName={}\0SessionType=Normal\0TargetName={TARGET}\0", late.name);
    let answer = late.login_request(0x87, text.as_bytes());
    assert_eq!(answer.header[36..38], [2, 3], "the target does not exist");
}

#[test]
fn initiators_that_do_not_log_out_are_disconnected() {
    let served = ServedUnits::start(&["a"]);
    let mut initiator = served.log_in();
    served.remove("a", 300);
    while let Some(pdu) = initiator.receive() {
        assert_eq!(pdu.opcode(), 0x32);
    }
}
