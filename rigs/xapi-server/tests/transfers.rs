//! Downloads and uploads disks and machines. Programs that share no code with this server read them.

#![allow(clippy::unwrap_used, reason = "all of it is test")]
#![allow(clippy::disallowed_methods, reason = "tests run the peers")]

mod rig;

use std::path::Path;

use holdfast_block::SeededRandom;
use holdfast_xapi_server::{Checksum, NewDisk, NewVm, SrPlace, VhdBitmaps, VhdOrder};
use rig::{Rig, curl, download, peer, run, upload};
use serde_json::json;

/// Not a multiple of the blocks of VHD and XVA.
const DISK_BYTES: u64 = (9 << 20) + 4096;

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn reference(value: &serde_json::Value) -> &str {
    value.as_str().unwrap()
}

#[test]
fn a_disk_goes_out_raw_and_as_vhd() {
    let rig = Rig::new();
    let vm = rig.add_vm("Running", DISK_BYTES);
    let (_, disk) = rig.snapshot(&vm);
    let expected = rig.server.disk_bytes(&vm, "xvda");
    let (raw, vhd) = (rig.path("a.raw"), rig.path("a.vhd"));
    let address = rig.server.address();
    let url = rig.url(
        &address,
        "/export_raw_vdi",
        &[("vdi", reference(&disk)), ("format", "raw")],
    );
    assert_eq!(download(&url, &raw), (0, 200));
    assert!(std::fs::read(&raw).unwrap() == expected);
    let url = rig.url(
        &address,
        "/export_raw_vdi",
        &[("vdi", reference(&disk)), ("format", "vhd")],
    );
    assert_eq!(download(&url, &vhd), (0, 200));
    // For a VHD of an unknown creator, qemu-img would derive the size from the geometry.
    let image = format!("driver=vpc,file.filename={},force_size_calc=current_size", text(&vhd));
    let copy = rig.path("copy.raw");
    run(
        "qemu-img",
        &["convert", "--image-opts", &image, "-O", "raw", text(&copy)],
    );
    assert!(std::fs::read(&copy).unwrap() == expected);
    let report = peer("read_vhd.py", &[&vhd, &copy]);
    assert!(std::fs::read(&copy).unwrap() == expected);
    assert_eq!(report["blocks"], json!([0, 4]), "blocks of zeroes are left out");
    assert_eq!(
        (&report["kind"], &report["sorted"], &report["creator"]),
        (&json!(3), &json!(true), &json!("caml"))
    );
}

#[test]
fn changes_are_exported_as_a_differencing_vhd() {
    let rig = Rig::new();
    let vm = rig.add_vm("Running", DISK_BYTES);
    let (_, before) = rig.snapshot(&vm);
    let base = rig.path("base.raw");
    std::fs::write(&base, rig.server.disk_bytes(&vm, "xvda")).unwrap();
    rig.server.write_disk(&vm, "xvda", (3 << 20) + 512, &[9; 1024]);
    rig.server.write_disk(&vm, "xvda", 80_000, &[0; 100]);
    rig.server.write_disk(&vm, "xvda", DISK_BYTES - 512, &[8; 512]);
    let (_, after) = rig.snapshot(&vm);
    let expected = rig.server.disk_bytes(&vm, "xvda");
    let query = [
        ("vdi", reference(&after)),
        ("format", "vhd"),
        ("base", reference(&before)),
    ];
    let url = rig.url(&rig.server.address(), "/export_raw_vdi", &query);
    let (vhd, copy) = (rig.path("a.vhd"), rig.path("copy.raw"));
    for (bitmaps, order, marked) in [
        (VhdBitmaps::Full, VhdOrder::Sorted, 3 * 4096),
        (VhdBitmaps::Changed, VhdOrder::Sorted, 4),
        (VhdBitmaps::Full, VhdOrder::Reversed, 3 * 4096),
    ] {
        rig.server.change_habits(|habits| {
            habits.vhd_bitmaps = bitmaps;
            habits.vhd_order = order;
        });
        assert_eq!(download(&url, &vhd), (0, 200));
        let report = peer("read_vhd.py", &[&vhd, &copy, &base]);
        assert!(std::fs::read(&copy).unwrap() == expected, "{bitmaps:?} {order:?}");
        assert_eq!(report["blocks"], json!([0, 1, 4]));
        assert_eq!(report["marked"], json!(marked), "{bitmaps:?}");
        assert_eq!(report["sorted"], json!(order == VhdOrder::Sorted));
        let uuid = rig.call("VDI.get_uuid", std::slice::from_ref(&before));
        assert_eq!(report["parent"], json!(reference(&uuid).replace('-', "")));
    }
}

#[test]
fn a_disk_comes_in_raw_and_as_vhd() {
    let rig = Rig::new();
    let vm = rig.add_vm("Halted", 8 << 20);
    let vm_reference = rig.call("VM.get_by_uuid", &[json!(vm)]);
    let disk = rig.disk_of(&vm_reference);
    let address = rig.server.address();
    let file = rig.path("in");
    let bytes = SeededRandom::new(11).bytes(8 << 20);
    std::fs::write(&file, &bytes).unwrap();
    let task = rig.task();
    let url = rig.url(
        &address,
        "/import_raw_vdi",
        &[("vdi", reference(&disk)), ("task_id", &task)],
    );
    assert_eq!(upload(&file, &url), (0, 200));
    assert_eq!(rig.end_of(&task), ("success".to_owned(), Vec::new()));
    assert!(rig.server.disk_bytes(&vm, "xvda") == bytes);
    // A VHD of another writer changes only the blocks that it contains.
    let (other, vhd) = (rig.path("other.raw"), rig.path("other.vhd"));
    std::fs::write(&other, [&[3; 5000][..], &vec![0; (8 << 20) - 5000]].concat()).unwrap();
    let convert = [
        "convert",
        "-f",
        "raw",
        "-O",
        "vpc",
        "-o",
        "subformat=dynamic,force_size=on",
        text(&other),
        text(&vhd),
    ];
    run("qemu-img", &convert);
    let task = rig.task();
    let query = [("vdi", reference(&disk)), ("format", "vhd"), ("task_id", task.as_str())];
    assert_eq!(upload(&vhd, &rig.url(&address, "/import_raw_vdi", &query)), (0, 200));
    assert_eq!(rig.end_of(&task), ("success".to_owned(), Vec::new()));
    let now = rig.server.disk_bytes(&vm, "xvda");
    assert!(now[..5000] == [3; 5000] && now[2 << 20..] == bytes[2 << 20..]);
    // A raw disk may be uploaded to a storage, where it creates a disk; a VHD may not.
    let vdis = rig.server.vdis().len();
    let sr = rig.server.shared_sr();
    let url = rig.url(&address, "/import_raw_vdi", &[("sr_uuid", &sr)]);
    assert_eq!(upload(&file, &url), (0, 200));
    assert_eq!(rig.server.vdis().len(), vdis + 1);
    let url = rig.url(&address, "/import_raw_vdi", &[("sr_uuid", &sr), ("format", "vhd")]);
    assert_eq!(upload(&vhd, &url).1, 400);
}

#[test]
fn chunks_and_strange_requests_are_refused() {
    let rig = Rig::new();
    let vm = rig.add_vm("Halted", 8 << 20);
    let disk = rig.disk_of(&rig.call("VM.get_by_uuid", &[json!(vm)]));
    let address = rig.server.address();
    let file = rig.path("in");
    std::fs::write(&file, [0; 512]).unwrap();
    let refused = |url: &str, arguments: &[&str]| {
        let all = [
            &["-o", "/dev/null", "-w", "%{http_code}", "-T", text(&file)],
            arguments,
            &[url],
        ]
        .concat();
        String::from_utf8(curl(&all).stdout).unwrap()
    };
    let query = [("vdi", reference(&disk))];
    let url = rig.url(&address, "/import_raw_vdi", &query);
    assert_eq!(refused(&url, &["-H", "Transfer-Encoding: chunked"]), "403");
    let url = rig.url(
        &address,
        "/import_raw_vdi",
        &[query[0], ("format", "vhd"), ("chunked", "true")],
    );
    assert_eq!(refused(&url, &[]), "404");
    let url = rig.url(&address, "/import", &[]);
    assert_eq!(refused(&url, &["-H", "Transfer-Encoding: chunked"]), "403");
    let url = format!("https://{address}/export_raw_vdi?vdi={}", reference(&disk));
    assert_eq!(download(&url, &rig.path("x")).1, 401);
    let basic = curl(&[
        "-u",
        "root:correct horse",
        "-o",
        "/dev/null",
        "-w",
        "%{http_code}",
        &url,
    ]);
    assert_eq!(basic.stdout, b"200");
    let cookie = format!("session_id={}", rig.session());
    assert_eq!(
        curl(&["-b", &cookie, "-o", "/dev/null", "-w", "%{http_code}", &url]).stdout,
        b"200"
    );
    assert_eq!(
        rig.server.tasks(),
        [],
        "the tasks of transfers without one of their own are gone"
    );
}

#[test]
fn a_machine_goes_out_and_comes_in() {
    let rig = Rig::new();
    let vm = rig.add_vm("Running", DISK_BYTES);
    let (snapshot, _) = rig.snapshot(&vm);
    let expected = rig.server.disk_bytes(&vm, "xvda");
    let address = rig.server.address();
    let (xva, disks) = (rig.path("a.xva"), rig.path("out"));
    std::fs::create_dir(&disks).unwrap();
    for (packing, checksum, keep_alive_every) in [
        ("false", Checksum::Xxhash, 0),
        ("true", Checksum::Sha1, 0),
        ("zstd", Checksum::Xxhash, 3),
    ] {
        rig.server.change_habits(|habits| {
            habits.checksum = checksum;
            habits.keep_alive_every = keep_alive_every;
        });
        let query = [("ref", reference(&snapshot)), ("use_compression", packing)];
        assert_eq!(download(&rig.url(&address, "/export", &query), &xva), (0, 200));
        let plain = rig.path("plain.xva");
        match packing {
            "false" => drop(std::fs::copy(&xva, &plain).unwrap()),
            "true" => unpack("gzip -dc", &xva, &plain),
            _ => unpack("zstd -dc", &xva, &plain),
        }
        let report = peer("read_xva.py", &[&plain, &disks]);
        assert!(std::fs::read(disks.join("0.raw")).unwrap() == expected, "{packing}");
        assert_eq!(report["power"], json!(["Halted"]));
        assert_eq!(report["names"], json!(["snapshot"]));
        assert_eq!(report["export_vsn"], json!("2"));
        assert_eq!(report["empty"].as_u64().unwrap() > 0, keep_alive_every > 0);

        let task = rig.task();
        let url = rig.url(&address, "/import", &[("task_id", &task)]);
        assert_eq!(upload(&xva, &url), (0, 200));
        let result = rig.call("task.get_result", &[json!(task)]);
        assert_eq!(rig.end_of(&task).0, "success");
        let result = reference(&result).to_owned();
        let new = result
            .strip_prefix("<value><array><data><value>")
            .and_then(|rest| rest.strip_suffix("</value></data></array></value>"))
            .unwrap();
        let uuid = rig.call("VM.get_uuid", &[json!(new)]);
        let bytes = rig.server.disk_bytes(reference(&uuid), "xvda");
        assert_eq!(bytes.len(), 10 << 20, "storage rounds up");
        assert!(bytes[..expected.len()] == expected);
    }
}

fn unpack(program: &str, from: &Path, to: &Path) {
    run("sh", &["-c", &format!("{program} '{}' > '{}'", text(from), text(to))]);
}

#[test]
fn an_archive_with_a_wrong_checksum_leaves_nothing_behind() {
    use holdfast_xapi_server::Fault;
    let rig = Rig::new();
    let vm = rig.add_vm("Halted", DISK_BYTES);
    let address = rig.server.address();
    rig.server.faults().once(Fault::ChecksumWrong);
    let xva = rig.path("a.xva");
    assert_eq!(
        download(&rig.url(&address, "/export", &[("uuid", &vm)]), &xva),
        (0, 200)
    );
    let before = (rig.server.vms(), rig.server.vdis());
    let task = rig.task();
    upload(&xva, &rig.url(&address, "/import", &[("task_id", &task)]));
    assert_eq!(
        rig.end_of(&task),
        (
            "failure".to_owned(),
            vec!["IMPORT_ERROR_SOME_CHECKSUMS_FAILED".to_owned()]
        )
    );
    assert_eq!((rig.server.vms(), rig.server.vdis()), before);
    assert_eq!(
        upload(&xva, &rig.url(&address, "/import", &[("force", "true")])),
        (0, 200)
    );
    assert_eq!(rig.server.vms().len(), 2);
    // An archive that ends too early.
    let whole = std::fs::read(&xva).unwrap();
    std::fs::write(&xva, &whole[..whole.len() / 2]).unwrap();
    let task = rig.task();
    upload(&xva, &rig.url(&address, "/import", &[("task_id", &task)]));
    assert_eq!(
        rig.end_of(&task),
        ("failure".to_owned(), vec!["IMPORT_ERROR_PREMATURE_EOF".to_owned()])
    );
    assert_eq!(rig.server.vms().len(), 2);
}

#[test]
fn metadata_goes_out_with_snapshots_and_comes_in_without_bytes() {
    let rig = Rig::new();
    let vm = rig.add_vm("Running", DISK_BYTES);
    rig.snapshot(&vm);
    let file = rig.path("meta.xva");
    let url = rig.url(&rig.server.address(), "/export_metadata", &[("uuid", &vm)]);
    assert_eq!(download(&url, &file), (0, 200));
    let report = peer("read_xva.py", &[&file, &rig.path("")]);
    assert_eq!(report["names"], json!(["machine", "snapshot"]));
    assert_eq!(report["power"], json!(["Running", "Halted"]));
    assert_eq!(report["prefixes"], json!([]));
    let vdis = rig.server.vdis().len();
    let dry = rig.url(&rig.server.address(), "/import_metadata", &[("dry_run", "true")]);
    assert_eq!(upload(&file, &dry), (0, 200));
    assert_eq!(rig.server.vms().len(), 2);
    assert_eq!(
        upload(&file, &rig.url(&rig.server.address(), "/import_metadata", &[])),
        (0, 200)
    );
    assert_eq!(rig.server.vms().len(), 4);
    assert_eq!(rig.server.vdis().len(), vdis);
}

#[test]
fn the_master_sends_transfers_to_the_host_that_sees_the_storage() {
    let rig = Rig::new();
    let mut disk = NewDisk::new("xvda", 4 << 20);
    disk.place = SrPlace::OnSlave;
    let vm = rig.server.add_vm(&NewVm {
        name: "far".to_owned(),
        disks: vec![disk],
        power_state: "Halted".to_owned(),
    });
    rig.server.write_disk(&vm, "xvda", 5, b"far away");
    let reference_of_disk = rig.disk_of(&rig.call("VM.get_by_uuid", &[json!(vm)]));
    let query = [("vdi", reference(&reference_of_disk))];
    let file = rig.path("a.raw");
    let address = rig.server.address();
    let (out, back) = (
        rig.url(&address, "/export_raw_vdi", &query),
        rig.url(&address, "/import_raw_vdi", &query),
    );
    assert_eq!(download(&out, &file).1, 302);
    let head = String::from_utf8(curl(&["-D", "-", "-o", "/dev/null", &out]).stdout).unwrap();
    let location = format!(
        "Location: {}",
        rig.url(&rig.server.slave_address(), "/export_raw_vdi", &query)
    );
    assert!(head.contains(&location), "{head}");
    assert_eq!(
        curl(&["-L", "-o", text(&file), "-w", "%{http_code}", &out]).stdout,
        b"200"
    );
    assert!(std::fs::read(&file).unwrap() == rig.server.disk_bytes(&vm, "xvda"));
    assert_eq!(upload(&file, &back).1, 302);
    assert_eq!(
        curl(&["-L", "-T", text(&file), "-o", "/dev/null", "-w", "%{http_code}", &back]).stdout,
        b"200"
    );
    let calls = rig.server.calls();
    let exports = calls
        .iter()
        .filter(|call| call.starts_with("GET /export_raw_vdi"))
        .count();
    assert_eq!(exports, 4, "two to the master alone, one to both hosts: {calls:?}");
}
