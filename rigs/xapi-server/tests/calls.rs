//! Calls: by a client that was written for XenServer, manually, and to the wrong host.

#![allow(clippy::unwrap_used, reason = "all of it is test")]
#![allow(clippy::disallowed_methods, reason = "tests run the peers")]

mod rig;

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};

use rig::{Rig, curl, python, run, script_path};
use serde_json::json;

const DISK_BYTES: u64 = 8 << 20;

#[test]
fn the_python_client_of_xenserver_gets_the_expected_replies() {
    let rig = Rig::new();
    let vm = rig.add_vm("Running", DISK_BYTES);
    let sessions = rig.server.session_count();
    let mut client = Command::new(python())
        .args([
            &script_path("calls.py"),
            &format!("https://{}", rig.server.address()),
            &vm,
        ])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    let mut output = BufReader::new(client.stdout.take().unwrap());
    output.read_line(&mut line).unwrap();
    assert_eq!(line, "write\n");
    // Across a block boundary, and in the last block.
    rig.server.write_disk(&vm, "xvda", (4 << 16) - 10, &[1; 20]);
    rig.server.write_disk(&vm, "xvda", DISK_BYTES - 1, &[1]);
    client.stdin.take().unwrap().write_all(b"go on\n").unwrap();
    assert!(client.wait().unwrap().success());
    assert_eq!(rig.server.vms().len(), 1);
    assert_eq!(rig.server.vdis().len(), 1);
    assert_eq!(rig.server.tasks(), []);
    assert_eq!(rig.server.session_count(), sessions);
    let files = std::fs::read_dir(rig.path("disks")).unwrap().count();
    assert_eq!(files, 1, "bytes of disks that are gone are gone");
}

#[test]
fn json_has_numbers_and_errors_with_data() {
    let rig = Rig::new();
    let uuid = rig.add_vm("Halted", DISK_BYTES);
    let vm = rig.call("VM.get_by_uuid", &[json!(uuid)]);
    let record = rig.call("VM.get_record", &[vm]);
    assert_eq!(record["VCPUs_max"], json!(2));
    assert_eq!(record["HVM_shadow_multiplier"], json!(1.0));
    assert_eq!(record["snapshot_time"], json!("19700101T00:00:00Z"));
    let error = rig.try_call("VM.get_by_uuid", &[json!("x")]).unwrap_err();
    assert_eq!(error, ["UUID_INVALID", "VM", "x"]);
    let url = format!("https://{}/jsonrpc", rig.server.address());
    let old = curl(&[
        "-d",
        r#"{"method":"VM.get_all","params":["OpaqueRef:x"],"id":"a"}"#,
        &url,
    ]);
    let old: serde_json::Value = serde_json::from_slice(&old.stdout).unwrap();
    assert_eq!(
        old,
        json!({"result": null, "error": ["SESSION_INVALID", "OpaqueRef:x"], "id": "a"})
    );
    let nonsense = curl(&["-d", "nonsense", "--write-out", "%{http_code}", "-o", "/dev/null", &url]);
    assert_eq!(nonsense.stdout, b"500");
}

#[test]
fn the_slave_names_the_master_without_a_port() {
    let rig = Rig::new();
    let login = [json!("root"), json!("correct horse")];
    let slave = rig.server.slave_address();
    let answer = Rig::ask(&slave, "session.login_with_password", &login);
    assert_eq!(answer["error"]["message"], "HOST_IS_SLAVE");
    assert_eq!(answer["error"]["data"], json!(["127.0.0.1"]));
    rig.server.move_master();
    assert!(Rig::ask(&slave, "session.login_with_password", &login)["result"].is_string());
    let answer = Rig::ask(&rig.server.address(), "session.login_with_password", &login);
    assert_eq!(answer["error"]["data"], json!(["127.0.0.2"]));
}

#[test]
fn others_make_the_same_of_the_certificate() {
    let rig = Rig::new();
    let certificate = rig.path("certificate.pem");
    std::fs::write(&certificate, rig.server.certificate_pem()).unwrap();
    let path = certificate.to_str().unwrap();
    let printed = run("openssl", &["x509", "-in", path, "-noout", "-fingerprint", "-sha256"]);
    assert_eq!(printed.trim().split_once('=').unwrap().1, rig.server.fingerprint());
    // curl accepts the certificate as its own authority, for its address.
    let trusting = |address: &str| {
        let url = format!("https://{address}/nothing");
        let arguments = [
            "--silent",
            "--cacert",
            path,
            "-o",
            "/dev/null",
            "-w",
            "%{http_code}",
            &url,
        ];
        Command::new("curl").args(arguments).output().unwrap().stdout
    };
    assert_eq!(trusting(&rig.server.address()), b"404");
    assert_eq!(trusting(&rig.server.slave_address()), b"000");
    let before = rig.server.fingerprint();
    rig.server.change_certificate().unwrap();
    assert_ne!(rig.server.fingerprint(), before);
    assert_eq!(trusting(&rig.server.address()), b"000");
}
