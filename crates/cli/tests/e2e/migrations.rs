//! `migrate`: a machine moves between two hosts.

mod bare;
mod bare_kills;
mod commands;
mod containers;
mod handovers;
mod interrupted_files;
mod kills;
mod pauses;
mod post_copy;
mod snapshots;
mod tpm;
mod two_hosts;
mod undo;

use std::io::Write as _;
use std::path::Path;
use std::time::Duration;

use holdfast_block::Clock as _;
use holdfast_test_kit::libvirt::LibvirtLab;
use holdfast_test_kit::run;
use serde_json::Value;

use crate::rig::noise;
use crate::writing_guest::assert_one_moment;
use two_hosts::{TwoHosts, process_of};

fn write_file(path: &Path, bytes: &[u8]) {
    let mut file = std::fs::File::create(path).unwrap();
    file.write_all(bytes).unwrap();
}

/// Reports of `migrate`.
pub(crate) fn reports() -> Vec<Value> {
    let Some(hosts) = TwoHosts::new() else {
        return Vec::new();
    };
    let plan = hosts.moved(&["--dry-run"]);
    let repeated = hosts.moved(&["--max-frozen", "20s", "--repeat", "1", "--delete-former"]);
    assert_eq!(hosts.states(), ["running", "shut off"]);
    assert_eq!(repeated["round_trips"], 1, "{repeated}");
    let stopped_us = |direction: &str| {
        let times = repeated["times"].as_array().unwrap();
        let stopped = times.iter().find(|time| time["time"] == "stopped").unwrap();
        stopped[direction].as_u64().unwrap()
    };
    assert_eq!(stopped_us("there_max_us"), repeated["moves"][0]["stopped_us"]);
    assert_eq!(stopped_us("back_average_us"), repeated["moves"][1]["stopped_us"]);
    let mut reports = vec![plan, repeated, hosts.moved(&["--max-frozen", "20s"])];
    reports.extend(containers::reports());
    reports
}

#[test]
fn a_guest_moves_with_its_disk_and_its_memory() {
    let Some(hosts) = TwoHosts::new() else { return };
    hosts.here.virsh(&["autostart", "web1"]);
    let boot = hosts.console.last().unwrap().boot;
    let report = hosts.moved(&["--max-frozen", "20s"]);
    assert_eq!(hosts.states(), ["shut off", "running"]);
    assert_eq!(report["attempts"], 1, "{report}");
    let stopped_us = report["stopped_us"].as_u64().unwrap();
    assert!(stopped_us > 0 && stopped_us < 20_000_000, "{report}");
    assert_eq!(report["disks"][0]["size_bytes"], 64 << 20);
    // The guest runs on where it was, with the memory that it had.
    let later = hosts.console.wait_for_more(100);
    assert_eq!(later.boot, boot, "the guest has booted again");
    hosts.console.assert_no_mismatch();
    assert_eq!(hosts.names_there(), ["web1.raw"]);
    // The image here is kept as it was when the machine was stopped.
    let kept = hosts.rig.path("kept.raw");
    let image = hosts.image.to_str().unwrap();
    run(
        "qemu-img",
        &["convert", "-f", "qcow2", "-O", "raw", image, kept.to_str().unwrap()],
    );
    let stopped_at = assert_one_moment(&std::fs::read(kept).unwrap());
    hosts.there.virsh(&["destroy", "web1"]);
    let last = assert_one_moment(&std::fs::read(hosts.there.path("images/web1.raw")).unwrap());
    assert!(
        last > stopped_at,
        "{last}: written after {stopped_at}, when it was stopped here"
    );
    hosts.assert_no_sockets();
    // It starts with the host on which it is.
    let autostart = |lab: &LibvirtLab| lab.virsh(&["list", "--all", "--autostart"]).contains("web1");
    assert!(!autostart(&hosts.here) && autostart(&hosts.there));
    let kept = hosts.there.virsh(&["dumpxml", "--inactive", "web1"]);
    assert!(kept.contains("web1.raw") && kept.contains("type='raw'"), "{kept}");
}

/// The disks that the machine had at a host before are compared, and only what differs is sent.
#[test]
fn a_machine_comes_back_with_the_differences_of_its_disks() {
    let Some(hosts) = TwoHosts::new() else { return };
    let boot = hosts.console.last().unwrap().boot;
    // What is sent depends on the speed of the link, which decides about compression.
    let sent = |report: &Value| report["disks"][0]["uncompressed_bytes"].as_u64().unwrap();
    let first = hosts.moved(&["--max-frozen", "20s"]);
    let hosts = hosts.turned();
    let plan = hosts.moved(&["--dry-run"]);
    assert_eq!(plan["disks"][0]["seed"], hosts.image.to_str().unwrap(), "{plan}");
    let back = hosts.moved(&["--max-frozen", "20s"]);
    assert_eq!(hosts.states(), ["shut off", "running"]);
    assert!(sent(&back) * 2 < sent(&first), "{first} {back}");
    // The image with which it began is kept.
    assert!(hosts.image.exists());
    let hosts = hosts.turned();
    let again = hosts.moved(&["--max-frozen", "20s", "--delete-former"]);
    assert_eq!(hosts.states(), ["shut off", "running"]);
    assert_eq!(hosts.names_there(), ["web1-2.raw"]);
    assert!(sent(&again) * 2 < sent(&first), "{first} {again}");
    let later = hosts.console.wait_for_more(50);
    assert_eq!(later.boot, boot, "the guest has booted again");
    hosts.console.assert_no_mismatch();
}

#[test]
fn a_machine_that_would_be_stopped_for_too_long_stays_and_can_be_moved_later() {
    let Some(hosts) = TwoHosts::new() else { return };
    // No pass over ssh is as short as this.
    let output = hosts.migrate(&["--max-frozen", "1ms", "--json"]);
    let document: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(document["status"], "error", "{document}");
    assert_eq!(hosts.states(), ["running", "absent"]);
    hosts.console.wait_for_more(20);
    hosts.assert_no_sockets();
    // What was copied is used by the next move.
    assert_eq!(
        hosts.names_there(),
        [".web1.raw.holdfast-copy", ".web1.raw.holdfast-copy.journal"]
    );
    hosts.moved(&["--max-frozen", "20s"]);
    assert_eq!(hosts.states(), ["shut off", "running"]);
    hosts.console.wait_for_more(50);
    hosts.console.assert_no_mismatch();
    assert_eq!(hosts.names_there(), ["web1.raw"]);
}

/// The guest changes 16 MiB of its memory all the time, and the link has 8 MiB/s.
#[test]
#[ignore = "the guest keeps a core busy for a minute: make torture"]
fn a_guest_whose_memory_changes_too_fast_stays_unless_it_may_be_slowed() {
    let Some(hosts) = TwoHosts::new() else { return };
    hosts.here.virsh(&["destroy", "web1"]);
    let raw = hosts.rig.path("boot.raw");
    write_file(&raw, &memory_writer());
    let (raw, image) = (raw.to_str().unwrap(), hosts.image.to_str().unwrap());
    run("qemu-img", &["convert", "-f", "raw", "-O", "qcow2", raw, image]);
    let configuration = hosts.here.virsh(&["dumpxml", "--inactive", "web1"]);
    let is_kept = |line: &&str| {
        !["<kernel>", "<initrd>", "<cmdline>"]
            .iter()
            .any(|element| line.contains(element))
    };
    let lines: Vec<&str> = configuration.lines().filter(is_kept).collect();
    hosts.here.define_xml(&lines.join("\n").replace("163840", "32768"));
    hosts.here.virsh(&["start", "web1"]);
    hosts.here.virsh(&["migrate-setspeed", "web1", "8"]);

    let words = hosts.words(&["--accept-incomplete-memory", "--max-frozen", "200ms"]);
    let (kind, text) = hosts
        .rig
        .error(1, &words.iter().map(String::as_str).collect::<Vec<_>>());
    let is_expected = kind == "refused" && text.contains("changes faster than it can be sent");
    assert!(is_expected, "{kind}: {text}");
    assert_eq!(hosts.states(), ["running", "absent"]);
    let output = hosts.migrate(&["--max-frozen", "200ms", "--throttle"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("its processors are slowed by"), "{said}");
    assert_eq!(hosts.states(), ["shut off", "running"], "{said}");
}

/// A disk that boots into a loop, which changes one word in each page from 2 to 18 MiB, about 10,000 pages per second.
fn memory_writer() -> Vec<u8> {
    #[rustfmt::skip]
    let code = [
        0xFA,                               // cli
        0x31, 0xC0,                         // xor ax, ax
        0x8E, 0xD8,                         // mov ds, ax
        0x0F, 0x01, 0x16, 0x58, 0x7C,       // lgdt [0x7C58]
        0x0F, 0x20, 0xC0,                   // mov eax, cr0
        0x0C, 0x01,                         // or al, 1
        0x0F, 0x22, 0xC0,                   // mov cr0, eax
        0xEA, 0x17, 0x7C, 0x08, 0x00,       // jmp 8:0x7C17, in 32 bits from here on
        0x66, 0xB8, 0x10, 0x00,             // mov ax, 16
        0x8E, 0xD8,                         // mov ds, ax
        0x8E, 0xC0,                         // mov es, ax
        0xBF, 0x00, 0x00, 0x20, 0x00,       // again: mov edi, 2 MiB
        0xFF, 0x07,                         // page: inc dword [edi]
        0xB9, 0x50, 0xC3, 0x00, 0x00,       // mov ecx, 50000
        0xE2, 0xFE,                         // delay: loop delay
        0x81, 0xC7, 0x00, 0x10, 0x00, 0x00, // add edi, 4096
        0x81, 0xFF, 0x00, 0x00, 0x20, 0x01, // cmp edi, 18 MiB
        0x72, 0xE9,                         // jb page
        0xEB, 0xE2,                         // jmp again
        0x00, 0x00, 0x00,
        // The table of segments, at 0x7C40: none, code, data.
        0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,
        0xFF, 0xFF, 0x00, 0x00, 0x00, 0x9A, 0xCF, 0x00,
        0xFF, 0xFF, 0x00, 0x00, 0x00, 0x92, 0xCF, 0x00,
        // Its size and address, at 0x7C58.
        0x17, 0x00, 0x40, 0x7C, 0x00, 0x00,
    ];
    let mut disk = vec![0; 1 << 20];
    disk[..code.len()].copy_from_slice(&code);
    disk[510..512].copy_from_slice(&[0x55, 0xAA]);
    disk
}

/// With a disk in a chain of images, and variables of its firmware.
#[test]
fn a_machine_that_is_shut_off_moves_with_its_files_and_comes_back() {
    let Some(hosts) = TwoHosts::new() else { return };
    hosts.here.virsh(&["destroy", "web1"]);
    let raw = hosts.rig.path("content.raw");
    let content = |path: &Path| {
        let words = ["convert", "-O", "raw", path.to_str().unwrap(), raw.to_str().unwrap()];
        run("qemu-img", &words);
        std::fs::read(&raw).unwrap()
    };
    let overlay = hosts.here.path("overlay.qcow2");
    let (image, top) = (hosts.image.to_str().unwrap(), overlay.to_str().unwrap());
    run(
        "qemu-img",
        &["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", image, top],
    );
    run("qemu-io", &["-f", "qcow2", "-c", "write -P 90 8M 1M", top]);
    let variables = |lab: &LibvirtLab, name: &str| {
        let folder = format!("/proc/{}/root/var/lib/libvirt/qemu/nvram", process_of(lab));
        std::fs::create_dir_all(&folder).unwrap();
        Path::new(&folder).join(name)
    };
    write_file(&variables(&hosts.here, "web1_VARS.fd"), &noise(128 << 10, 1));
    let configuration = hosts.here.virsh(&["dumpxml", "--inactive", "web1"]);
    let firmware = "<loader type='pflash' readonly='yes'>/usr/share/OVMF/OVMF_CODE_4M.fd</loader>\
                    <nvram>/var/lib/libvirt/qemu/nvram/web1_VARS.fd</nvram><kernel>";
    let configuration = configuration.replace(image, top).replace("<kernel>", firmware);
    hosts.here.define_xml(&configuration);
    hosts.here.virsh(&["autostart", "web1"]);

    let plan = hosts.moved(&["--dry-run"]);
    assert_eq!(plan["obstacles"], Value::Array(Vec::new()), "{plan}");
    let report = hosts.moved(&[]);
    assert_eq!(
        (&report["state"], &report["phases"][1]["phase"]),
        (&"shut-off".into(), &"define".into())
    );
    assert_eq!(hosts.states(), ["shut off", "shut off"]);
    let moved = hosts.there.path("images/overlay.raw");
    assert!(content(&moved) == content(&overlay));
    assert_eq!(
        std::fs::read(variables(&hosts.there, "web1_VARS.fd")).unwrap(),
        noise(128 << 10, 1)
    );
    let autostart = |lab: &LibvirtLab| lab.virsh(&["list", "--all", "--autostart"]).contains("web1");
    assert!(!autostart(&hosts.here) && autostart(&hosts.there));

    // It has run there.
    let write = ["-f", "raw", "-c", "write -P 91 20M 64k", moved.to_str().unwrap()];
    run("qemu-io", &write);
    write_file(&variables(&hosts.there, "web1_VARS.fd"), &noise(128 << 10, 2));
    let hosts = hosts.turned();
    // The image of another machine depends on the former disk, which is kept with a warning.
    let linked = hosts.there.path("linked.qcow2");
    let linked_path = linked.to_str().unwrap();
    run(
        "qemu-img",
        &["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", top, linked_path],
    );
    hosts.there.define_on("web2", &[("qcow2", linked)]);
    let words = hosts.words(&["--delete-former"]);
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let document = hosts.rig.json(3, &words);
    let warnings = document["warnings"].to_string();
    assert!(
        warnings.contains("overlay.qcow2 is kept: web2 may need it"),
        "{warnings}"
    );
    let report = &document["report"];
    let sent_bytes = report["disks"][0]["sent_bytes"].as_u64().unwrap();
    assert!((64 << 10..128 << 10).contains(&sent_bytes), "{report}");
    assert!(content(&hosts.there.path("images/overlay.raw")) == content(&moved));
    let returned = hosts.there.virsh(&["dumpxml", "--inactive", "web1"]);
    assert!(returned.contains("/web1_VARS-2.fd"), "{returned}");
    assert_eq!(
        std::fs::read(variables(&hosts.there, "web1_VARS-2.fd")).unwrap(),
        noise(128 << 10, 2)
    );
    assert!(overlay.exists() && hosts.image.exists());
    assert!(!variables(&hosts.there, "web1_VARS.fd").exists());
}

/// A mount that only the hypervisor there has shows it another file with the name of the copy.
#[test]
fn a_machine_does_not_start_with_another_file() {
    let Some(hosts) = TwoHosts::new() else { return };
    let other = hosts.there.path("other");
    std::fs::create_dir(&other).unwrap();
    let disk = std::fs::File::create(other.join("web1.raw")).unwrap();
    disk.set_len(64 << 20).unwrap();
    let namespace = format!("--mount=/proc/{}/ns/mnt", process_of(&hosts.there));
    let (other, images) = (other.to_str().unwrap(), hosts.there.path("images"));
    run(
        "nsenter",
        &[&namespace, "mount", "--bind", other, images.to_str().unwrap()],
    );
    let words = hosts.words(&["--accept-incomplete-memory", "--max-frozen", "2s"]);
    let document = hosts.rig.json(1, &words.iter().map(String::as_str).collect::<Vec<_>>());
    run("nsenter", &[&namespace, "umount", images.to_str().unwrap()]);
    let error = &document["error"];
    assert_eq!(error["kind"], "io", "{document}");
    assert!(error.to_string().contains("has another file open"), "{document}");
    // Another attempt would stop the machine again, for nothing.
    let stops = document["warnings"].as_array().unwrap().iter();
    let stops = stops.filter(|warning| warning.to_string().contains("was stopped for"));
    assert_eq!(stops.count(), 1, "{document}");
    assert_eq!(hosts.states(), ["running", "absent"]);
    hosts.console.wait_for_more(20);
    hosts.console.assert_no_mismatch();
    assert_eq!(
        hosts.names_there(),
        [".web1.raw.holdfast-copy", ".web1.raw.holdfast-copy.journal"]
    );
}

/// The program is killed at many moments: the machine runs on one host, and the next attempt moves it.
#[test]
fn a_killed_move_leaves_the_machine_on_one_host() {
    let Some(hosts) = TwoHosts::new() else { return };
    let words = hosts.words(&["--accept-incomplete-memory", "--max-frozen", "20s"]);
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    for delay_ms in [400, 900, 1400, 1900, 2300, 2600] {
        let mut killed = hosts.rig.command(&words).spawn().unwrap();
        hosts.here.clock.sleep(Duration::from_millis(delay_ms));
        killed.kill().unwrap();
        killed.wait().unwrap();
        hosts.wait_for_one_owner();
        hosts.console.wait_for_more(20);
        if hosts.states()[1] == "running" {
            break;
        }
    }
    if hosts.states()[0] == "running" {
        hosts.moved(&["--max-frozen", "20s"]);
    }
    assert_eq!(hosts.states(), ["shut off", "running"]);
    hosts.console.wait_for_more(50);
    hosts.console.assert_no_mismatch();
    // Each killed attempt may have left a socket.
    hosts.rig.run(&["doctor", "--fix", "--connect", &hosts.here.uri()]);
    assert_eq!(TwoHosts::sockets(&hosts.here), [""; 0]);
}

#[test]
fn what_prevents_a_move_is_said_before_anything_is_copied() {
    let Some(hosts) = TwoHosts::new() else { return };
    let obstacles = |more: &[&str]| {
        let words = hosts.words(&[&["--dry-run"], more].concat());
        let report = hosts.rig.report(&words.iter().map(String::as_str).collect::<Vec<_>>());
        report["obstacles"].to_string()
    };
    let emulated = obstacles(&[]);
    let is_lossy = emulated.contains("may then lose writes to memory");
    assert_eq!(obstacles(&["--accept-incomplete-memory"]), "[]");
    if is_lossy {
        let words = hosts.words(&[]);
        let (kind, text) = hosts
            .rig
            .error(1, &words.iter().map(String::as_str).collect::<Vec<_>>());
        assert!(
            kind == "refused" && text.contains("may then lose writes"),
            "{kind}: {text}"
        );
    }
    let copy = hosts.here.path("copy.raw");
    let words = ["blockcopy", "web1", "vda", copy.to_str().unwrap(), "--format", "raw"];
    hosts.here.virsh(&[&words[..], &["--transient-job"]].concat());
    let found = obstacles(&["--accept-incomplete-memory"]);
    assert!(found.contains("its QEMU has the mirror job copy-vda-"), "{found}");
    hosts.here.virsh(&["blockjob", "web1", "vda", "--abort"]);
    // A file and a machine of these names are there.
    let other = hosts.there.path("images/web1.raw");
    std::fs::File::create(&other).unwrap();
    hosts.there.define("web1", &["raw"]);
    let plan = hosts.moved(&["--dry-run"]);
    assert!(
        plan["notes"].to_string().contains("web1.raw exists there, and is kept"),
        "{plan}"
    );
    assert!(
        plan["disks"][0]["path"].as_str().unwrap().ends_with("/web1-2.raw"),
        "{plan}"
    );
    let found = plan["obstacles"].to_string();
    assert!(found.contains("a machine web1 exists there"), "{found}");
    assert_eq!(hosts.migrate(&[]).status.code(), Some(1));
    assert_eq!(hosts.states(), ["running", "shut off"]);
    hosts.here.virsh(&["suspend", "web1"]);
    let found = obstacles(&[]);
    assert!(found.contains("it is paused"), "{found}");
    let (kind, text) = hosts.rig.error(2, &["migrate", "web1", "host2"]);
    assert!(
        kind == "usage" && text.contains("not the address of a host"),
        "{kind}: {text}"
    );
}
