//! Tests of the monitor connection.

use std::time::Duration;

use holdfast_host::qmp::{Monitor as _, MonitorError, QmpCommand, QmpSocket};
use serde_json::{Value, json};

use holdfast_test_kit::qemu::QemuLab;

#[test]
fn commands_are_answered_refused_and_answered_from_many_threads() {
    let lab = QemuLab::new(&["qcow2", "raw"]);
    let refused = lab
        .monitor
        .execute(&QmpCommand::new("blockdev-del", json!({ "node-name": "missing" })));
    let Err(MonitorError::Refused {
        command, description, ..
    }) = refused
    else {
        panic!("{refused:?}");
    };
    assert_eq!(command, "blockdev-del");
    assert!(description.contains("missing"), "{description}");
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| (0..50).for_each(|_| assert!(lab.is_running())));
        }
    });
    let disks = lab.disks();
    let found: Vec<_> = disks
        .iter()
        .map(|disk| (&disk.node[..], &disk.driver[..], disk.size_bytes))
        .collect();
    assert_eq!(found, [("format0", "qcow2", 16 << 20), ("format1", "raw", 16 << 20)]);
    assert_eq!(disks[0].device, "/machine/peripheral/disk0/virtio-backend");
    assert!(!disks[0].is_read_only && disks[0].filename.ends_with("disk0"));
}

#[test]
fn events_are_queued_until_they_are_taken() {
    let lab = QemuLab::new(&[]);
    lab.execute("stop", Value::Null);
    lab.execute("cont", Value::Null);
    let stop = lab
        .monitor
        .wait_event(Duration::from_secs(5), |event| event.name == "STOP");
    assert!(stop.is_some_and(|event| event.time_us > 0));
    let resume = lab
        .monitor
        .wait_event(Duration::from_secs(5), |event| event.name == "RESUME");
    assert!(resume.is_some());
    assert_eq!(lab.monitor.take_events(), []);
    assert_eq!(lab.monitor.wait_event(Duration::from_millis(10), |_| true), None);
}

#[test]
fn the_exit_of_qemu_is_reported_and_a_second_client_times_out() {
    let lab = QemuLab::new(&[]);
    let second = QmpSocket::connect(&lab.path("qmp"));
    let Err(error) = second else {
        panic!("QEMU serves one client at a time")
    };
    assert!(matches!(error, MonitorError::TimedOut { .. }), "{error}");
    assert!(error.to_string().contains("one client at a time"), "{error}");
    // QEMU may exit before or after it answers.
    lab.monitor.execute(&QmpCommand::new("quit", Value::Null)).ok();
    let after_exit = lab.monitor.execute(&QmpCommand::new("query-status", Value::Null));
    assert!(matches!(after_exit, Err(MonitorError::Gone { .. })), "{after_exit:?}");
    assert!(QmpSocket::connect(&lab.path("qmp")).is_err());
}
