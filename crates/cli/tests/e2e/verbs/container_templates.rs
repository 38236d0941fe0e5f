//! Containers from templates, and templates from containers.

use holdfast_block::BlockDevice as _;
use holdfast_image::{ContainerLock, ContainerTree, LiveChain, LiveOptions};
use serde_json::Value;

use crate::host::{system, text};
use crate::program::stderr;
use crate::rig::Rig;
use crate::templates::{image, push, rig};

const TRUST: [&str; 2] = ["--allowed-signers", "signers"];

fn created(rig: &Rig, words: &[&str]) -> Value {
    rig.report(&[&["container", "create"], words, &TRUST].concat())
}

/// The first bytes of the disk of a container.
fn disk(rig: &Rig, container: &str, length: usize) -> Vec<u8> {
    let path = rig.path(container);
    let _lock = ContainerLock::take(&path).unwrap();
    let chain = LiveChain::open(&path, LiveOptions::default()).unwrap();
    let mut bytes = vec![0; length];
    chain.read_at(&mut bytes, 0).unwrap();
    bytes
}

fn property(rig: &Rig, container: &str, name: &str) -> String {
    let tree = ContainerTree::open(&rig.path(container)).unwrap();
    tree.properties()[name].clone()
}

/// An image with an ext4 that has one file.
fn file_system(rig: &Rig, name: &str) {
    std::fs::create_dir_all(rig.path("content")).unwrap();
    rig.write("content/greeting", b"hello");
    let (image, content) = (rig.path(name), rig.path("content"));
    let words = ["-q", "-F", "-d", text(&content), text(&image), "24M"];
    system("mkfs.ext4", &words).unwrap();
}

#[test]
fn a_container_has_the_disk_of_its_template() {
    let rig = rig();
    file_system(&rig, "base.raw");
    let bytes = rig.read("base.raw");
    push(&rig, "base", "base.raw", "anna", &[]);
    let plan = created(&rig, &["web1", "--template", "base", "--dry-run"]);
    assert!(plan["dry_run"] == true && !rig.path("web1").exists(), "{plan}");
    for (name, words) in [("web1", &[][..]), ("web2", &["--format", "parallels"])] {
        let report = created(&rig, &[&[name, "--template", "base"], words].concat());
        assert_eq!(report["size_bytes"], bytes.len(), "{report}");
        assert_eq!(report["filesystem"], "ext4", "{report}");
        assert_eq!(report["signer"], "anna@example.com", "{report}");
        let template = report["template"].as_str().unwrap();
        assert!(template.starts_with("base:latest@"), "{template}");
        assert!(disk(&rig, name, bytes.len()) == bytes, "{name}");
        rig.ok(&["container", "check", name]);
        assert_eq!(property(&rig, name, "source"), format!("template {template}"));
    }
}

#[test]
fn only_trusted_templates_of_one_disk_become_containers() {
    let rig = rig();
    let bytes = image(&rig, "base.raw", 1);
    push(&rig, "base", "base.raw", "eve", &[]);
    let refused = |code: i32, words: &[&str], expected: &str| {
        let output = rig.code(code, &[&["container", "create", "web1"], words, &TRUST].concat());
        let message = stderr(&output);
        assert!(message.contains(expected), "{words:?}: {message}");
        assert!(!rig.path("web1").exists() && !rig.path(".web1.holdfast-new").exists());
    };
    refused(1, &["--template", "base"], "does not count");
    refused(2, &["--template", "base", "--from", "signers"], "cannot be used with");
    refused(2, &[], "<SIZE>");
    refused(2, &["1M"], "--allowed-signers is about the signatures of templates");
    refused(2, &["18446744073709551615"], "18446744073709551615");
    push(&rig, "good", "base.raw", "anna", &[]);
    refused(1, &["1M", "--template", "good"], "the disk has");
    let two = [
        "template",
        "push",
        "two",
        "vda=base.raw",
        "vdb=base.raw",
        "--sign",
        "anna",
    ];
    rig.ok(&two);
    refused(2, &["--template", "two"], "has 2 disks");
    // No file system is a warning: the disk can be used as a file.
    let output = rig.code(
        3,
        &[&["container", "create", "web1", "--template", "good"][..], &TRUST].concat(),
    );
    assert!(stderr(&output).contains("--disk"), "{}", stderr(&output));
    assert!(disk(&rig, "web1", bytes.len()) == bytes);
}

#[test]
fn a_container_becomes_a_template_and_grows_as_a_new_one() {
    let rig = rig();
    file_system(&rig, "base.raw");
    push(&rig, "base", "base.raw", "anna", &[]);
    created(&rig, &["web1", "--template", "base"]);
    rig.ok(&["backup", "--machine", "site", text(&rig.path("web1"))]);
    push(&rig, "web", "site", "bert", &[]);
    let report = created(&rig, &["web2", "48M", "--template", "web"]);
    assert_eq!(report["size_bytes"], 48 << 20, "{report}");
    assert_eq!(property(&rig, "web2", "filesystem"), "ext4");
    assert_eq!(property(&rig, "web2", "filesystem.grow"), (48 << 20).to_string());
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let point = rig.path("mnt");
    std::fs::create_dir(&point).unwrap();
    rig.ok(&["container", "mount", "web2", text(&point)]);
    let greeting = std::fs::read(point.join("greeting"));
    let size_bytes = rustix::fs::statvfs(&point).map(|stat| stat.f_blocks * stat.f_frsize);
    rig.ok(&["container", "unmount", "web2"]);
    assert_eq!(greeting.unwrap(), b"hello");
    assert!(size_bytes.unwrap() > 32 << 20, "it has grown");
}
