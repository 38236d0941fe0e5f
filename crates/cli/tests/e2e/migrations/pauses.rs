//! Machines that another program pauses while their memory is sent. Such a program may resume them at any time.

use std::time::Duration;

use holdfast_block::{Clock as _, SystemClock};
use holdfast_host::qmp::{Monitor as _, QmpCommand, QmpSocket};
use holdfast_test_kit::libvirt::LibvirtLab;
use serde_json::{Value, json};

use super::bare::{BareHosts, assert_moved_disk, texts};
use super::two_hosts::TwoHosts;
use crate::program::stderr;
use crate::schedules::wait_until;

/// Of the memory, in bytes per second. QEMU sends some 40 MiB.
const SLOW: u64 = 4 << 20;
const FAST: u64 = 1 << 30;
/// The command sees a pause that takes so long.
const PAUSE: Duration = Duration::from_millis(500);
/// The guest writes some blocks. An emulated machine may lose what it writes to its memory while that is sent.
const RUN: Duration = Duration::from_millis(50);

/// QEMU's monitor, for the other program.
trait OtherProgram {
    fn ask(&self, name: &'static str, arguments: Value) -> Value;

    fn send_slowly(&self) {
        // QEMU stops a machine as soon as its remaining memory takes less than the limit.
        let parameters = json!({ "max-bandwidth": SLOW, "downtime-limit": 10 });
        self.ask("migrate-set-parameters", parameters);
    }

    fn send_the_rest(&self) {
        let parameters = json!({ "max-bandwidth": FAST, "downtime-limit": 10_000 });
        self.ask("migrate-set-parameters", parameters);
    }

    fn status(&self) -> Value {
        self.ask("query-status", Value::Null)["status"].clone()
    }

    /// Pauses the machine when its memory is being sent, which then takes long.
    fn pause_while_memory_is_sent(&self) {
        wait_until("memory is sent", || {
            self.ask("query-migrate", Value::Null)["status"] == "active"
        });
        self.send_slowly();
        self.ask("stop", Value::Null);
        assert_eq!(self.status(), "paused");
    }

    fn pause_for_a_moment(&self) {
        self.pause_while_memory_is_sent();
        SystemClock::new().sleep(PAUSE);
        self.ask("cont", Value::Null);
        SystemClock::new().sleep(RUN);
        self.send_the_rest();
    }
}

impl OtherProgram for QmpSocket {
    fn ask(&self, name: &'static str, arguments: Value) -> Value {
        self.execute(&QmpCommand::new(name, arguments)).unwrap()
    }
}

impl OtherProgram for LibvirtLab {
    fn ask(&self, name: &'static str, arguments: Value) -> Value {
        let mut command = json!({ "execute": name });
        if !arguments.is_null() {
            command["arguments"] = arguments;
        }
        let answer = match name {
            "stop" => self.virsh(&["suspend", "web1"]),
            _ => self.virsh(&["qemu-monitor-command", "web1", &command.to_string()]),
        };
        serde_json::from_str::<Value>(&answer).map_or(Value::Null, |answer| answer["return"].clone())
    }
}

/// What is written after the pause is not lost.
#[test]
fn a_qemu_that_is_paused_for_a_moment_moves() {
    let Some(hosts) = BareHosts::new(&[]) else { return };
    let other = QmpSocket::connect(&hosts.rig.path("run/test.qmp")).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| other.pause_for_a_moment());
        hosts.rig.ok(&texts(&hosts.words(&hosts.there(), &[])));
    });
    assert_eq!(hosts.statuses(), ["absent", "running"]);
    hosts.console.wait_for_more(100);
    hosts.console.assert_no_mismatch();
    hosts.pause("run-there");
    assert_moved_disk(&hosts.moved_disk("web1.raw"));
}

#[test]
fn a_qemu_that_is_paused_stays_here() {
    let Some(hosts) = BareHosts::new(&[]) else { return };
    let other = QmpSocket::connect(&hosts.rig.path("run/test.qmp")).unwrap();
    let words = hosts.words(&hosts.there(), &[]);
    let error = std::thread::scope(|scope| {
        scope.spawn(|| {
            other.pause_while_memory_is_sent();
            other.send_the_rest();
        });
        hosts.rig.error(1, &texts(&words)).1
    });
    assert!(error.contains("was paused here while it was moved (paused)"), "{error}");
    assert_eq!(hosts.statuses()[1], "absent");
    // Before QEMU 8.2, its state is that of a machine that has moved.
    assert!(["paused", "postmigrate"].contains(&other.status().as_str().unwrap()));
    let error = hosts.rig.error(1, &texts(&words)).1;
    assert!(error.contains("resume it"), "{error}");
    other.ask("cont", Value::Null);
    hosts.console.wait_for_more(20);
    drop(other);
    hosts.rig.ok(&texts(&words));
    assert_eq!(hosts.statuses(), ["absent", "running"]);
    hosts.console.wait_for_more(20);
    hosts.console.assert_no_mismatch();
}

/// libvirt does not resume it before the migration has ended.
#[test]
fn a_machine_of_libvirt_that_is_paused_stays_here() {
    let Some(hosts) = TwoHosts::new() else { return };
    hosts.here.virsh(&["migrate-setspeed", "web1", "1"]);
    let output = std::thread::scope(|scope| {
        scope.spawn(|| {
            hosts.here.pause_while_memory_is_sent();
            hosts.here.send_the_rest();
        });
        hosts.migrate(&["--max-frozen", "20s"])
    });
    let error = stderr(&output);
    assert!(error.contains("was paused here while it was moved (paused)"), "{error}");
    let [here, there] = hosts.states();
    assert_eq!(there, "absent");
    // libvirt itself resumes a machine that ran when its migration began.
    if here == "paused" {
        hosts.here.virsh(&["resume", "web1"]);
    }
    hosts.console.wait_for_more(20);
    hosts.here.virsh(&["migrate-setspeed", "web1", "1000"]);
    hosts.moved(&["--max-frozen", "20s"]);
    assert_eq!(hosts.states(), ["shut off", "running"]);
    hosts.console.wait_for_more(20);
    hosts.console.assert_no_mismatch();
}
