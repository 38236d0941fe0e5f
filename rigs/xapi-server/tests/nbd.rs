//! Disks over NBD, read by libnbd with TLS.

#![allow(clippy::unwrap_used, reason = "all of it is test")]
#![allow(clippy::disallowed_methods, reason = "tests write files")]

mod rig;

use holdfast_xapi_server::NbdPurpose;
use rig::{Rig, run, succeeds};
use serde_json::{Value, json};

const DISK_BYTES: u64 = 8 << 20;

/// The URI for libnbd; special characters in the export's name are percent-encoded.
fn uri(rig: &Rig, place: &Value) -> String {
    let certificates = rig.path("certificates");
    std::fs::create_dir_all(&certificates).unwrap();
    std::fs::write(certificates.join("ca-cert.pem"), place["cert"].as_str().unwrap()).unwrap();
    let name = place["exportname"].as_str().unwrap();
    let name = name
        .replace('/', "%2F")
        .replace('?', "%3F")
        .replace('=', "%3D")
        .replace(':', "%3A");
    format!(
        "nbds://{}:{}/{name}?tls-certificates={}",
        place["address"].as_str().unwrap(),
        place["port"],
        certificates.display()
    )
}

#[test]
fn libnbd_reads_a_snapshot_under_tls_as_long_as_the_session_lasts() {
    let rig = Rig::new();
    let vm = rig.add_vm("Running", DISK_BYTES);
    let (_, disk) = rig.snapshot(&vm);
    let places = rig.call("VDI.get_nbd_info", std::slice::from_ref(&disk));
    let places = places.as_array().unwrap();
    assert_eq!(places.len(), 2, "both hosts see the storage");
    let copy = rig.path("copy.raw");
    for place in places {
        let uri = uri(&rig, place);
        assert_eq!(run("nbdinfo", &["--size", &uri]).trim(), DISK_BYTES.to_string());
        run("nbdcopy", &[&uri, copy.to_str().unwrap()]);
        assert!(std::fs::read(&copy).unwrap() == rig.server.disk_bytes(&vm, "xvda"));
    }
    assert!(run("nbdinfo", &[&uri(&rig, &places[0])]).contains("is_read_only: true"));
    // The disk is no longer in use.
    rig.call("VDI.destroy", &[disk]);
    rig.server.end_sessions();
    // The address is valid, but the session is not.
    assert!(!succeeds("nbdinfo", &["--size", &uri(&rig, &places[0])]));
}

#[test]
fn the_network_record_shows_whether_nbd_is_enabled() {
    let rig = Rig::new();
    let vm = rig.add_vm("Running", DISK_BYTES);
    let (_, disk) = rig.snapshot(&vm);
    let count = || {
        rig.call("VDI.get_nbd_info", std::slice::from_ref(&disk))
            .as_array()
            .unwrap()
            .len()
    };
    rig.server.set_nbd_purpose(NbdPurpose::None);
    assert_eq!(count(), 0);
    let network = rig.call("network.get_all", &[])[0].clone();
    rig.call("network.add_purpose", &[network.clone(), json!("nbd")]);
    assert_eq!(count(), 2);
    rig.call("network.remove_purpose", &[network, json!("nbd")]);
    assert_eq!(count(), 0);
}
