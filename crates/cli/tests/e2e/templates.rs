//! Templates: shared by name and tag, signed with real SSH keys, and accepted only with a trusted signature.

use std::process::{Command, Stdio};
use std::time::Duration;

use holdfast_block::{Clock as _, SystemClock};
use serde_json::Value;

use crate::program::{stderr, stdout};
use crate::rig::{Rig, noise};

const MIB: usize = 1 << 20;

/// Runs `ssh-keygen` in the folder of a rig.
#[expect(
    clippy::disallowed_methods,
    reason = "these tests run ssh-keygen as administrators do"
)]
fn keygen(rig: &Rig, words: &[&str]) {
    let output = Command::new("ssh-keygen")
        .args(words)
        .current_dir(rig.path("."))
        .stdin(Stdio::null())
        .output()
        .unwrap();
    assert!(output.status.success(), "{words:?}: {}", stderr(&output));
}

/// A rig with keys of Anna and Bert, which are trusted, and of Eve, which is not.
pub(crate) fn rig() -> Rig {
    let rig = Rig::new();
    for (name, kind) in [("anna", "ed25519"), ("bert", "rsa"), ("eve", "ed25519")] {
        keygen(&rig, &["-q", "-t", kind, "-N", "", "-f", name]);
    }
    let line = |name: &str| {
        let public = String::from_utf8(rig.read(&format!("{name}.pub"))).unwrap();
        format!("{name}@example.com namespaces=\"holdfast-template\" {public}")
    };
    rig.write("signers", (line("anna") + &line("bert")).as_bytes());
    rig
}

/// An image with a hole; returns the bytes of its disk.
pub(crate) fn image(rig: &Rig, name: &str, seed: u64) -> Vec<u8> {
    let mut bytes = noise(3 * MIB + 512, seed);
    bytes.resize(9 * MIB, 0);
    bytes.extend(noise(MIB + 1024, seed + 100));
    rig.write(name, &bytes);
    bytes
}

pub(crate) fn push(rig: &Rig, label: &str, source: &str, signer: &str, more: &[&str]) -> Value {
    rig.report(&[&["template", "push", label, source, "--sign", signer], more].concat())
}

const TRUST: [&str; 2] = ["--allowed-signers", "signers"];

pub(crate) fn pull_words<'w>(template: &'w str, target: &'w str) -> Vec<&'w str> {
    [&["template", "pull", template, target][..], &TRUST].concat()
}

/// Pulls a template, and compares it with the bytes of the disk.
pub(crate) fn assert_pulls(rig: &Rig, template: &str, bytes: &[u8]) -> Value {
    let report = rig.report(&pull_words(template, "pulled.raw"));
    assert!(rig.read("pulled.raw") == bytes, "{template} has other content");
    std::fs::remove_file(rig.path("pulled.raw")).unwrap();
    report
}

/// Asserts that a command is refused with this code and reason, and leaves no files.
pub(crate) fn assert_refused(rig: &Rig, words: &[&str], code: i32, kind: &str, reason: &str) {
    let before = rig.names(".");
    let (found, text) = rig.error(code, words);
    assert_eq!(
        (found.as_str(), text.contains(reason)),
        (kind, true),
        "{words:?}: {text}"
    );
    assert_eq!(rig.names("."), before, "{words:?} has left files");
}

#[test]
fn a_signed_template_is_pulled_as_it_was_pushed() {
    let rig = rig();
    let bytes = image(&rig, "debian.raw", 1);
    let pushed = push(
        &rig,
        "debian12",
        "debian.raw",
        "anna",
        &["--description", "Debian 12, büro"],
    );
    assert_eq!(
        (pushed["tag"].as_str(), pushed["is_signed"].as_bool()),
        (Some("latest"), Some(true))
    );
    let pulled = assert_pulls(&rig, "debian12", &bytes);
    assert_eq!(pulled["signer"], "anna@example.com");
    assert_eq!(pulled["content"], pushed["content"]);
    for format in ["qcow2", "vdi", "vhd", "vhdx", "vmdk"] {
        let target = format!("pulled.{format}");
        rig.ok(&pull_words("debian12:latest", &target));
        assert!(
            rig.ok(&["image", "compare", "debian.raw", &target, "--json"])
                .contains("\"different_bytes\":0"),
            "{format}"
        );
    }
    // Two pulled images have different identities.
    rig.ok(&pull_words("debian12", "other.vdi"));
    let id = |name: &str| rig.report(&["image", "identity", name])["id"].to_string();
    assert_ne!(id("pulled.vdi"), id("other.vdi"));
    let listed = rig.report(&[&["template", "list"][..], &TRUST].concat());
    let template = &listed["templates"][0];
    assert_eq!(template["signature"], "good");
    assert_eq!(template["description"], "Debian 12, büro");
    assert_eq!(template["size_bytes"], bytes.len());
    assert_eq!(template["own_bytes"], template["data_bytes"]);
}

/// An image in another format has the same disk, so it is the same content.
#[test]
fn the_content_id_depends_only_on_the_disk() {
    let rig = rig();
    image(&rig, "debian.raw", 1);
    rig.ok(&["image", "convert", "debian.raw", "other-name.qcow2"]);
    let one = push(&rig, "debian", "debian.raw", "anna", &[]);
    let again = push(&rig, "debian", "other-name.qcow2", "bert", &["--format", "qcow2"]);
    assert_eq!(one["content"], again["content"]);
    rig.ok(&["-r", "second", "init", "--no-encryption"]);
    let elsewhere = push(&rig, "another/name", "debian.raw", "anna", &["-r", "second"]);
    assert_eq!(one["content"], elsewhere["content"]);
    let content = one["content"].as_str().unwrap();
    let shown = rig.report(&[&["template", "show", "debian"][..], &TRUST].concat());
    assert_eq!(shown["template"]["content"], content);
    assert_eq!(shown["template"]["signer"], "bert@example.com");
    assert_eq!(shown["same_content"][0]["signer"], "anna@example.com");
}

#[test]
fn only_templates_with_a_trusted_signature_are_pulled() {
    let rig = rig();
    let bytes = image(&rig, "debian.raw", 1);
    assert_refused(
        &rig,
        &["template", "push", "debian", "debian.raw"],
        2,
        "usage",
        "there is no key to sign with",
    );
    assert_refused(
        &rig,
        &["template", "push", "debian", "debian.raw", "--sign", "missing"],
        1,
        "io",
        "missing",
    );
    push(&rig, "eves", "debian.raw", "eve", &[]);
    push(&rig, "annas", "debian.raw", "anna", &[]);
    rig.ok(&["template", "push", "unsigned", "debian.raw", "--unsigned"]);
    assert_refused(&rig, &pull_words("eves", "x.raw"), 1, "refused", "does not count");
    assert_refused(&rig, &pull_words("unsigned", "x.raw"), 1, "refused", "has no signature");
    let unheard = ["template", "pull", "annas", "x.raw"];
    assert_refused(&rig, &unheard, 1, "refused", "no file of allowed signers is given");
    let revoked = [&pull_words("annas", "x.raw")[..], &["--revoked-signers", "anna.pub"]].concat();
    assert_refused(&rig, &revoked, 1, "refused", "revoked");
    let missing = ["template", "pull", "annas", "x.raw", "--allowed-signers", "missing"];
    assert_refused(&rig, &missing, 1, "io", "missing");
    for name in ["eves", "unsigned"] {
        let words = [&pull_words(name, "x.raw")[..], &["--unsigned"]].concat();
        let output = rig.code(3, &words);
        assert!(
            stderr(&output).contains("has no signature that is trusted"),
            "{}",
            stderr(&output)
        );
        assert!(rig.read("x.raw") == bytes);
        std::fs::remove_file(rig.path("x.raw")).unwrap();
    }
    // Keys that are limited to another purpose, or have expired.
    let public = String::from_utf8(rig.read("anna.pub")).unwrap();
    for options in ["namespaces=\"git\"", "valid-before=\"20200101\""] {
        rig.write("signers", format!("anna {options} {public}").as_bytes());
        assert_refused(&rig, &pull_words("annas", "x.raw"), 1, "refused", "does not count");
    }
}

#[test]
fn signers_come_from_the_environment_and_the_configuration_of_the_user() {
    let mut rig = rig();
    image(&rig, "debian.raw", 1);
    let run = |rig: &Rig, words: &[&str], variables: &[(&str, &str)]| {
        let output = rig.command(words).envs(variables.iter().copied()).output().unwrap();
        assert!(output.status.success(), "{words:?}: {}", stderr(&output));
    };
    run(
        &rig,
        &["template", "push", "debian", "debian.raw"],
        &[("HOLDFAST_TEMPLATE_KEY", "anna")],
    );
    run(
        &rig,
        &["template", "pull", "debian", "1.raw"],
        &[("HOLDFAST_ALLOWED_SIGNERS", "signers")],
    );
    std::fs::create_dir_all(rig.path("config/holdfast")).unwrap();
    std::fs::copy(rig.path("signers"), rig.path("config/holdfast/allowed_signers")).unwrap();
    rig.have_configurations_in(rig.path("config"));
    run(&rig, &["template", "pull", "debian", "2.raw"], &[]);
    std::fs::copy(rig.path("anna.pub"), rig.path("config/holdfast/revoked_signers")).unwrap();
    assert_refused(&rig, &["template", "pull", "debian", "3.raw"], 1, "refused", "revoked");
}

/// Without a terminal, a key that asks for its passphrase would wait for ever.
#[test]
fn a_key_with_a_passphrase_is_refused_without_a_terminal() {
    let rig = rig();
    image(&rig, "debian.raw", 1);
    keygen(&rig, &["-q", "-t", "ed25519", "-N", "open sesame", "-f", "sealed"]);
    let words = ["template", "push", "debian", "debian.raw", "--sign", "sealed"];
    assert_refused(&rig, &words, 1, "key", "cannot sign");
    assert_eq!(
        rig.report(&["template", "list"])["templates"].as_array().unwrap().len(),
        0
    );
    assert!(rig.names("repo/snapshots").is_empty());
    push(&rig, "debian", "debian.raw", "anna", &[]);
}

/// Commands about snapshots of machines ignore templates; commands that store and check data do not.
#[test]
fn commands_about_machine_backups_ignore_templates() {
    let rig = rig();
    let bytes = image(&rig, "debian.raw", 1);
    rig.ok(&["backup", "debian.raw", "--time", "2026-01-01T10:00:00Z"]);
    rig.ok(&["backup", "debian.raw", "--time", "2026-01-02T10:00:00Z"]);
    let pushed = push(&rig, "debian", "debian.raw", "anna", &[]);
    let id = pushed["snapshot"].as_str().unwrap();
    assert_eq!(rig.snapshot_count(), 2);
    // "latest" is the newest snapshot of a machine.
    assert_eq!(rig.report(&["show", "latest"])["snapshot"]["machine"], "debian");
    for words in [
        &["show", id][..],
        &["forget", id],
        &["unprotect", id],
        &["protect", id],
        &["restore", id, "x.raw"],
    ] {
        assert_refused(&rig, words, 1, "refused", "is the template debian:latest");
    }
    rig.ok(&["prune", "--keep-last", "1"]);
    assert_eq!(rig.snapshot_count(), 1);
    rig.ok(&["forget", rig.report(&["list"])["snapshots"][0]["id"].as_str().unwrap()]);
    rig.ok(&["gc", "--repack-below", "100"]);
    assert_pulls(&rig, "debian", &bytes);
    assert_eq!(rig.report(&["verify"])["snapshot_count"], 1);
    rig.ok(&["scrub"]);
    assert_eq!(rig.report(&["stats"])["snapshot_count"], 1);
    // A program without support for templates respects this protection.
    assert!(rig.names("repo/protected").contains(&id.to_owned()));
    let status = rig.report(&["template", "list"]);
    assert_eq!(status["templates"][0]["snapshot"], id);
}

#[test]
fn a_pulled_machine_gets_a_new_identity() {
    let rig = rig();
    let (disk, data) = (image(&rig, "in/vda.raw", 1), image(&rig, "in/vdb.raw", 2));
    let xml = "<domain type='kvm'><name>web1</name><uuid>9f6d1b8e-1f2a-4c3d-8e4f-5a6b7c8d9e0f</uuid><memory unit='MiB'>512</memory>\
        <os><type arch='x86_64' machine='q35'>hvm</type></os><devices>\
        <disk type='file' device='disk'><driver name='qemu' type='raw'/><source file='/secret/vda.raw'/><target dev='vda' bus='virtio'/></disk>\
        <disk type='file' device='disk'><driver name='qemu' type='raw'/><source file='/secret/vdb.raw'/><target dev='vdb' bus='virtio'/></disk>\
        <interface type='network'><mac address='52:54:00:11:22:33'/><source network='default'/></interface></devices></domain>";
    rig.write("domain.xml", xml.as_bytes());
    machine_snapshot(&rig);
    let pushed = push(&rig, "web", "web1", "anna", &[]);
    let names = |key: &str| -> Vec<&str> {
        let list = pushed[key].as_array().unwrap();
        list.iter().map(|one| one["name"].as_str().unwrap()).collect()
    };
    assert_eq!(
        (names("disks"), names("files")),
        (vec!["vda", "vdb"], vec!["domain.xml"])
    );
    assert_refused(&rig, &pull_words("web", "x.qcow2"), 2, "usage", "has 2 disks");
    let pulled = rig.report(&pull_words("web", "web7"));
    assert_eq!(pulled["machine"], "web7");
    for (name, bytes) in [("vda", &disk), ("vdb", &data)] {
        rig.ok(&["image", "convert", &format!("web7/{name}.qcow2"), "back.raw"]);
        assert!(rig.read("back.raw") == **bytes, "{name}");
        std::fs::remove_file(rig.path("back.raw")).unwrap();
    }
    let text = String::from_utf8(rig.read("web7/domain.xml")).unwrap();
    assert!(
        text.contains("<name>web7</name>") && text.contains("web7/vda.qcow2"),
        "{text}"
    );
    for old in ["9f6d1b8e", "52:54:00:11:22:33", "/secret", "raw"] {
        assert!(!text.contains(old), "{old} is in {text}");
    }
    // The signed statement is stored beside the disk, and can be verified manually.
    let statement = rig.read("web7/template.txt");
    let words = [
        "-Y",
        "verify",
        "-f",
        "signers",
        "-I",
        "anna@example.com",
        "-n",
        "holdfast-template",
        "-s",
        "web7/template.txt.sig",
    ];
    verify_by_hand(&rig, &words, &statement);
    assert_refused(&rig, &pull_words("web", "web7"), 1, "exists", "web7");
    let kept = [&pull_words("web", "web1")[..], &["--keep-identity", "--to", "raw"]].concat();
    rig.ok(&kept);
    let text = String::from_utf8(rig.read("web1/domain.xml")).unwrap();
    assert!(
        text.contains("9f6d1b8e-1f2a") && text.contains("52:54:00:11:22:33"),
        "{text}"
    );
    assert_eq!(
        rig.names("web1"),
        ["domain.xml", "template.txt", "template.txt.sig", "vda.raw", "vdb.raw"]
    );
}

#[expect(
    clippy::disallowed_methods,
    reason = "these tests run ssh-keygen as administrators do"
)]
fn verify_by_hand(rig: &Rig, words: &[&str], text: &[u8]) {
    let mut child = Command::new("ssh-keygen")
        .args(words)
        .current_dir(rig.path("."))
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    std::io::Write::write_all(&mut child.stdin.take().unwrap(), text).unwrap();
    assert!(child.wait().unwrap().success());
}

/// A snapshot of the machine `web1` as of a libvirt backup: its images, and its configuration as a stream.
pub(crate) fn machine_snapshot(rig: &Rig) {
    let words = [
        "backup",
        "--machine",
        "web1",
        "vda=./in/vda.raw",
        "vdb=./in/vdb.raw",
        "domain.xml=-",
    ];
    let output = rig.run_with(&words, &rig.read("domain.xml"));
    assert!(output.status.success(), "{}", stderr(&output));
}

#[test]
fn a_copied_template_is_valid_and_protected() {
    let rig = rig();
    let bytes = image(&rig, "debian.raw", 1);
    rig.ok(&["backup", "debian.raw"]);
    let pushed = push(&rig, "debian", "debian.raw", "anna", &[]);
    rig.ok(&["-r", "second", "init", "--no-encryption"]);
    rig.ok(&["copy", "--to", "second", "--all"]);
    rig.ok(&["copy", "--to", "second", "--all"]);
    let in_second = ["-r", "second"];
    rig.ok(&[&in_second[..], &["prune", "--keep-last", "1"]].concat());
    let listed = rig.report(&[&in_second[..], &["template", "list"], &TRUST].concat());
    assert_eq!(listed["templates"].as_array().unwrap().len(), 1);
    assert_eq!(listed["templates"][0]["content"], pushed["content"]);
    assert_eq!(listed["templates"][0]["signer"], "anna@example.com");
    let id = listed["templates"][0]["snapshot"].as_str().unwrap().to_owned();
    assert!(rig.names("second/protected").contains(&id));
    // A program without support for templates has copied the snapshot without its protection: the next copy adds it.
    std::fs::remove_file(rig.path(&format!("second/protected/{id}"))).unwrap();
    rig.ok(&["copy", "--to", "second", "--all"]);
    assert!(rig.names("second/protected").contains(&id));
    let words = [&in_second[..], &pull_words("debian", "x.raw")].concat();
    rig.ok(&words);
    assert!(rig.read("x.raw") == bytes);
    // A template that was removed from the target is not copied again, as long as the target has another one of that
    // name.
    rig.ok(&["template", "tag", "debian", "debian:old", "--unsigned"]);
    rig.ok(&["copy", "--to", "second", "--all"]);
    rig.ok(&[&in_second[..], &["template", "remove", "debian:latest"]].concat());
    rig.ok(&["copy", "--to", "second", "--all"]);
    let listed = rig.report(&[&in_second[..], &["template", "list"]].concat());
    assert_eq!(listed["templates"].as_array().unwrap().len(), 1);
    assert_eq!(listed["templates"][0]["tag"], "old");
}

/// A killed push leaves no template, no lock, and no data that gc would keep.
#[test]
fn a_killed_push_leaves_nothing() {
    let rig = rig();
    image(&rig, "debian.raw", 1);
    let fifo = rig.path("waits");
    rustix::fs::mkfifoat(rustix::fs::CWD, &fifo, rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR).unwrap();
    // The reader of the key waits for a writer. The test opens the pipe for writing once, so that the push begins, and
    // then no more.
    let mut child = rig
        .command(&["template", "push", "debian", "debian.raw", "--sign", "waits"])
        .spawn()
        .unwrap();
    drop(std::fs::File::options().write(true).open(&fifo).unwrap());
    let clock = SystemClock::new();
    let is_there = |folder: &str| {
        rig.path(folder)
            .read_dir()
            .is_ok_and(|mut entries| entries.next().is_some())
    };
    while !is_there("repo/snapshots") || !is_there("repo/writers") {
        assert!(
            clock.now() < Duration::from_secs(60),
            "the push does not reach the signing"
        );
        clock.sleep(Duration::from_millis(10));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(
        rig.report(&["template", "list"])["templates"].as_array().unwrap().len(),
        0
    );
    assert_eq!(rig.snapshot_count(), 0);
    let output = rig.run(&["template", "push", "debian", "debian.raw", "--sign", "anna"]);
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(stderr(&output).contains("that was killed"), "{}", stderr(&output));
    assert_eq!(rig.names("repo/snapshots").len(), 1);
    // The program that signs has survived the push. It opens the key several times, and must not wait again.
    let flags = rustix::fs::OFlags::WRONLY | rustix::fs::OFlags::NONBLOCK;
    let writer = rustix::fs::open(&fifo, flags, rustix::fs::Mode::empty());
    std::fs::remove_file(&fifo).unwrap();
    drop(writer);
}

#[test]
fn existing_targets_of_a_pull_are_kept_unless_force_is_given() {
    let rig = rig();
    let bytes = image(&rig, "debian.raw", 1);
    push(&rig, "debian", "debian.raw", "anna", &[]);
    rig.write("there.raw", b"precious");
    assert_refused(&rig, &pull_words("debian", "there.raw"), 1, "exists", "there.raw");
    assert_eq!(rig.read("there.raw"), b"precious");
    rig.ok(&[&pull_words("debian", "there.raw")[..], &["--force"]].concat());
    assert!(rig.read("there.raw") == bytes);
    let text = stdout(&rig.code(0, &[&["template", "show", "debian"][..], &TRUST].concat()));
    assert!(text.contains("signed by anna@example.com (ED25519 SHA256:"), "{text}");
}
