//! Injected faults, as clients see them.

#![allow(clippy::unwrap_used, reason = "all of it is test")]
#![allow(clippy::disallowed_methods, reason = "tests write files")]

mod rig;

use std::path::Path;
use std::time::Duration;

use holdfast_block::{Clock, SystemClock};
use holdfast_xapi_server::Fault;
use rig::{Rig, curl, download, peer, upload};
use serde_json::json;

const DISK_BYTES: u64 = 8 << 20;

#[test]
fn a_session_ends_after_some_calls() {
    let mut rig = Rig::new();
    rig.server.faults().once(Fault::SessionExpiresAfterCalls(1));
    assert!(rig.try_call("VM.get_all", &[]).is_ok());
    assert_eq!(rig.try_call("VM.get_all", &[]).unwrap_err()[0], "SESSION_INVALID");
    rig.log_in();
    assert!(rig.try_call("VM.get_all", &[]).is_ok());
}

#[test]
fn a_session_ends_in_the_middle_of_a_transfer() {
    let mut rig = Rig::new();
    let vm = rig.add_vm("Halted", DISK_BYTES);
    let disk = rig.disk_of(&rig.call("VM.get_by_uuid", &[json!(vm)]));
    let file = rig.path("out");
    let expired = |rig: &Rig| rig.try_call("VM.get_all", &[]).unwrap_err()[0] == "SESSION_INVALID";
    // The transfer of a single disk continues.
    rig.server.faults().once(Fault::SessionExpiresAfterBytes(1_000_000));
    let url = rig.url(
        &rig.server.address(),
        "/export_raw_vdi",
        &[("vdi", disk.as_str().unwrap())],
    );
    assert_eq!(download(&url, &file), (0, 200));
    assert_eq!(std::fs::metadata(&file).unwrap().len(), DISK_BYTES);
    assert!(expired(&rig));
    // The transfer of a machine ends early, without an error that the client could see.
    rig.log_in();
    rig.server.faults().once(Fault::SessionExpiresAfterBytes(1_000_000));
    let task = rig.task();
    let url = rig.url(&rig.server.address(), "/export", &[("uuid", &vm), ("task_id", &task)]);
    assert_eq!(download(&url, &file), (0, 200));
    assert_eq!(std::fs::metadata(&file).unwrap().len(), 1_000_000);
    assert!(expired(&rig));
    rig.log_in();
    let (status, error) = rig.end_of(&task);
    assert_eq!((status.as_str(), error[0].as_str()), ("failure", "SESSION_INVALID"));
}

#[test]
fn connections_are_cut() {
    let rig = Rig::new();
    let vm = rig.add_vm("Halted", DISK_BYTES);
    let disk = rig.disk_of(&rig.call("VM.get_by_uuid", &[json!(vm)]));
    let file = rig.path("out");
    let query = [("vdi", disk.as_str().unwrap())];
    rig.server.faults().once(Fault::CutDownloadAfter(100_000));
    let task = rig.task();
    let url = rig.url(
        &rig.server.address(),
        "/export_raw_vdi",
        &[query[0], ("task_id", &task)],
    );
    let report = peer("end.py", &[Path::new(&url)]);
    assert_eq!(report, json!({"status": 200, "bytes": 100_000, "end": "cut"}));
    assert_eq!(rig.end_of(&task).0, "failure");
    let report = peer("end.py", &[Path::new(&url)]);
    assert_eq!(report, json!({"status": 200, "bytes": DISK_BYTES, "end": "goodbye"}));
    let task = rig.task();
    std::fs::write(&file, vec![1; 8 << 20]).unwrap();
    rig.server.faults().once(Fault::CutUploadAfter(1 << 20));
    let url = rig.url(
        &rig.server.address(),
        "/import_raw_vdi",
        &[query[0], ("task_id", &task)],
    );
    // The result of curl depends on what it receives first: the status 200, which is sent before the data, or the end
    // of the connection.
    upload(&file, &url);
    assert_eq!(rig.end_of(&task).0, "failure");
    let bytes = rig.server.disk_bytes(&vm, "xvda");
    assert!(bytes[..1 << 20].iter().all(|byte| *byte == 1), "what came is there");
    assert!(
        bytes[1 << 20..][..1 << 20].iter().all(|byte| *byte == 0),
        "the rest is as it was"
    );
    // The disk is not in use any more.
    assert_eq!(
        upload(&file, &rig.url(&rig.server.address(), "/import_raw_vdi", &query)),
        (0, 200)
    );
}

#[test]
fn a_transfer_looks_well_and_its_task_fails() {
    let rig = Rig::new();
    let vm = rig.add_vm("Halted", DISK_BYTES);
    let disk = rig.disk_of(&rig.call("VM.get_by_uuid", &[json!(vm)]));
    let error = vec!["VDI_IO_ERROR".to_owned(), "Device I/O errors".to_owned()];
    rig.server.faults().once(Fault::TransferFails(error.clone()));
    let task = rig.task();
    let query = [("vdi", disk.as_str().unwrap()), ("task_id", task.as_str())];
    let url = rig.url(&rig.server.address(), "/export_raw_vdi", &query);
    assert_eq!(download(&url, &rig.path("out")), (0, 200));
    assert_eq!(rig.end_of(&task), ("failure".to_owned(), error));
    // A disk to which a running machine writes cannot be read: status 200, no data, and a task with the reason.
    rig.server.set_power_state(&vm, "Running");
    let task = rig.task();
    let url = rig.url(
        &rig.server.address(),
        "/export_raw_vdi",
        &[query[0], ("task_id", &task)],
    );
    assert_eq!(download(&url, &rig.path("out")), (0, 200));
    assert_eq!(rig.end_of(&task).1[0], "VDI_IN_USE");
}

#[test]
fn answers_are_late_or_only_a_status() {
    let rig = Rig::new();
    let url = format!("https://{}/jsonrpc", rig.server.address());
    let status = |arguments: &[&str]| {
        let all = [&["-o", "/dev/null", "-w", "%{http_code}"], arguments].concat();
        String::from_utf8(curl(&all).stdout).unwrap()
    };
    rig.server.faults().times(Fault::RpcStatus(503), 2);
    assert_eq!(status(&["-d", "{}", &url]), "503");
    assert_eq!(status(&["-d", "{}", &url]), "503");
    rig.server.faults().once(Fault::HandlerStatus(500));
    assert_eq!(
        status(&[&rig.url(&rig.server.address(), "/export", &[("uuid", "x")])]),
        "500"
    );
    let clock = SystemClock::new();
    rig.server
        .faults()
        .once(Fault::AnswerDelayed(Duration::from_millis(300)));
    rig.call("VM.get_all", &[]);
    assert!(clock.now() >= Duration::from_millis(300));
    assert_eq!(rig.server.faults().armed(), []);
}

#[test]
fn a_stuck_task_creeps_and_can_be_cancelled_before_anything_was_done() {
    let rig = Rig::new();
    let uuid = rig.add_vm("Running", DISK_BYTES);
    let vm = rig.call("VM.get_by_uuid", &[json!(uuid)]);
    rig.server.faults().once(Fault::TaskStuck(1000));
    let task = rig.call("Async.VM.snapshot", &[vm.clone(), json!("never")]);
    let look = || rig.call("task.get_record", std::slice::from_ref(&task));
    let (first, second) = (look(), look());
    assert_eq!(second["status"], "pending");
    assert!(second["progress"].as_f64() > first["progress"].as_f64());
    assert!(second["progress"].as_f64() < Some(0.01));
    rig.call("task.cancel", std::slice::from_ref(&task));
    let record = look();
    assert_eq!(
        (&record["status"], &record["error_info"][0]),
        (&json!("cancelled"), &json!("TASK_CANCELLED"))
    );
    assert_eq!(rig.server.vms().len(), 1);
    // A task that is not cancelled is completed later.
    rig.server.faults().once(Fault::TaskStuck(2));
    let task = rig.call("Async.VM.snapshot", &[vm, json!("late")]);
    let look = || rig.call("task.get_status", std::slice::from_ref(&task));
    assert_eq!([look(), look()], [json!("pending"), json!("pending")]);
    assert_eq!(rig.server.vms().len(), 1);
    assert_eq!(look(), json!("success"));
    assert_eq!(rig.server.vms().len(), 2);
}

#[test]
fn a_transfer_whose_task_is_cancelled_ends() {
    let rig = Rig::new();
    let vm = rig.add_vm("Halted", DISK_BYTES);
    let task = rig.task();
    rig.call("task.cancel", &[json!(task)]);
    let url = rig.url(&rig.server.address(), "/export", &[("uuid", &vm), ("task_id", &task)]);
    assert_eq!(download(&url, &rig.path("out")).1, 200);
    let (status, error) = rig.end_of(&task);
    assert_eq!((status.as_str(), error[0].as_str()), ("cancelled", "TASK_CANCELLED"));
}

#[test]
fn calls_fail_as_planned_and_leave_nothing() {
    let rig = Rig::new();
    let uuid = rig.add_vm("Running", DISK_BYTES);
    let vm = rig.call("VM.get_by_uuid", &[json!(uuid)]);
    rig.server.faults().fail_snapshot_out_of_space();
    let task = rig.call("Async.VM.snapshot", &[vm.clone(), json!("x")]);
    rig.call("task.get_status", std::slice::from_ref(&task));
    let (status, error) = rig.end_of(task.as_str().unwrap());
    assert_eq!(
        (status.as_str(), error[0].as_str()),
        ("failure", "SR_BACKEND_FAILURE_44")
    );
    assert_eq!((rig.server.vms().len(), rig.server.vdis().len()), (1, 1));
    let snapshot = rig.call("VM.snapshot", &[vm, json!("x")]);
    rig.server
        .faults()
        .fail_call("VM.destroy", &["INTERNAL_ERROR", "not now"]);
    let error = rig.try_call("VM.destroy", std::slice::from_ref(&snapshot)).unwrap_err();
    assert_eq!(error, ["INTERNAL_ERROR", "not now"]);
    rig.call("VM.destroy", &[snapshot]);
}

#[test]
fn a_machine_that_is_exported_is_left_alone() {
    let rig = Rig::new();
    let uuid = rig.add_vm("Halted", DISK_BYTES);
    let vm = rig.call("VM.get_by_uuid", &[json!(uuid)]);
    rig.server.faults().once(Fault::TransferDelayed(Duration::from_secs(4)));
    let url = rig.url(&rig.server.address(), "/export", &[("uuid", &uuid)]);
    let file = rig.path("out");
    std::thread::scope(|scope| {
        let download = scope.spawn(|| download(&url, &file));
        let clock = SystemClock::new();
        let is_locked = || {
            let record = rig.server.record("VM", &uuid).unwrap();
            record["current_operations"] != json!({})
        };
        while !is_locked() {
            clock.sleep(Duration::from_millis(5));
        }
        let error = rig.try_call("VM.destroy", std::slice::from_ref(&vm)).unwrap_err();
        assert_eq!(
            &error[..4],
            ["OTHER_OPERATION_IN_PROGRESS", "VM", vm.as_str().unwrap(), "export"]
        );
        let error = rig.try_call("VDI.destroy", &[rig.disk_of(&vm)]).unwrap_err();
        assert_eq!(error[0], "VDI_IN_USE");
        assert_eq!(download.join().unwrap(), (0, 200));
    });
    rig.call("VM.destroy", &[vm]);
}
