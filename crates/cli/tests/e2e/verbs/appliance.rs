//! Files that only the appliance reads: a virtual machine with a real kernel of Debian (`scripts/guest-kernel`).

use std::collections::BTreeSet;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::Stdio;

use rustix::process::geteuid;

use super::mounts::wait_for;
use crate::host::{system, text};
use crate::program::{stderr, stdout};
use crate::rig::{Rig, noise};

const MIB: u64 = 1 << 20;

/// The kernel, with its modules beside it.
fn kernel() -> String {
    let guest = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../build/guest");
    let version = std::fs::read_to_string(guest.join("version"));
    let version = version.unwrap_or_else(|error| panic!("{}: {error} (scripts/setup makes it)", guest.display()));
    let image = guest.join("tree/boot").join(format!("vmlinuz-{}", version.trim()));
    image.canonicalize().unwrap().display().to_string()
}

/// The words of a command with the kernel.
fn with_kernel(words: &[&'static str]) -> Vec<&'static str> {
    let kernel: &'static str = kernel().leak();
    [words, &["--appliance-kernel", kernel]].concat()
}

fn new_image(rig: &Rig, name: &str, size_bytes: u64) -> PathBuf {
    let path = rig.path(name);
    std::fs::File::create(&path).unwrap().set_len(size_bytes).unwrap();
    path
}

fn fill(rig: &Rig, folder: &str) {
    let path = |name: &str| rig.path(&format!("{folder}/{name}"));
    for name in ["etc/web", "var/lib"] {
        std::fs::create_dir_all(path(name)).unwrap();
    }
    let write = |name: &str, bytes: &[u8]| rig.write(&format!("{folder}/{name}"), bytes);
    write("etc/fstab", b"/dev/vda / btrfs\n");
    write("etc/web/web.conf", b"listen 192.0.2.7\n");
    write("var/lib/data.bin", &noise(3_300_000, 9));
    write("var/empty", b"");
    write("var/\u{fc}nusual \u{1b}name", b"kept");
    std::fs::hard_link(path("etc/fstab"), path("etc/fstab.old")).unwrap();
    symlink("web/web.conf", path("etc/current")).unwrap();
    std::fs::set_permissions(path("etc/fstab"), std::fs::Permissions::from_mode(0o4751)).unwrap();
    system(
        "setfattr",
        &["-n", "user.comment", "-v", "kept", text(&path("etc/web/web.conf"))],
    )
    .unwrap();
    for name in ["etc/fstab", "var/lib", "etc", "."] {
        system("touch", &["-h", "-d", "2024-02-29T12:34:56Z", text(&path(name))]).unwrap();
    }
}

/// What rsync would change below `copy` to make it equal to `original`.
fn differences(rig: &Rig, original: &str, copy: &str) -> String {
    let (original, copy) = (rig.path(&format!("{original}/")), rig.path(&format!("{copy}/")));
    let words = ["-naHXc", "--delete", "--itemize-changes"];
    let output = system("rsync", &[&words[..], &[text(&original), text(&copy)]].concat()).unwrap();
    // The folder for the restore is the user's.
    let lines = output.lines().filter(|line| !line.ends_with(" ./"));
    lines.collect::<Vec<_>>().join("\n")
}

#[test]
fn a_btrfs_is_listed_and_restored_by_the_appliance() {
    let rig = Rig::new();
    fill(&rig, "source");
    let image = new_image(&rig, "vda.raw", 192 * MIB);
    let source = rig.path("source");
    system(
        "mkfs.btrfs",
        &["-q", "-L", "data", "--rootdir", text(&source), text(&image)],
    )
    .unwrap();
    rig.ok(&["backup", "-m", "web1", "vda=vda.raw"]);

    let listed = rig.report(&["files", "ls", "web1", "--reader", "process"]);
    assert_eq!(listed["volumes"][0]["is_readable"], false);
    let listed = rig.report(&["files", "ls", "web1"]);
    assert_eq!(listed["volumes"][0]["reader"], "appliance");

    let restored = rig.report(&with_kernel(&["files", "restore", "web1:/", "out"]));
    assert_eq!(restored["reader"], "appliance");
    assert_eq!(differences(&rig, "source", "out"), "");
    let output = rig.code(1, &with_kernel(&["files", "cat", "web1:/etc/missing"]));
    assert!(stderr(&output).contains("/etc/missing"), "{}", stderr(&output));
}

/// The log of a file system that was not unmounted is replayed on an overlay.
#[test]
fn an_xfs_of_a_running_machine_is_read_after_a_replay_of_its_log() {
    if !geteuid().is_root() {
        return;
    }
    let rig = Rig::new();
    let image = new_image(&rig, "live.raw", 320 * MIB);
    system("mkfs.xfs", &["-q", text(&image)]).unwrap();
    std::fs::create_dir(rig.path("mnt")).unwrap();
    system("mount", &["-o", "loop", text(&image), text(&rig.path("mnt"))]).unwrap();
    rig.write("mnt/written", &noise(200_000, 3));
    system("sync", &["-f", text(&rig.path("mnt"))]).unwrap();
    system("cp", &["--sparse=always", text(&image), text(&rig.path("vda.raw"))]).unwrap();
    system("umount", &[text(&rig.path("mnt"))]).unwrap();
    rig.ok(&["backup", "-m", "web1", "vda=vda.raw"]);

    let output = rig.code(1, &["files", "cat", "web1:/written", "--reader", "process"]);
    assert!(stderr(&output).contains("log"), "{}", stderr(&output));
    let output = rig.code(0, &with_kernel(&["files", "cat", "web1:/written"]));
    assert!(output.stdout == noise(200_000, 3));
    rig.ok(&["verify", "web1"]);
}

/// The passphrase comes from a file; a wrong one is an error with a hint.
#[test]
fn an_encrypted_volume_is_opened_with_its_passphrase() {
    let rig = Rig::new();
    fill(&rig, "source");
    let plain = new_image(&rig, "plain.raw", 24 * MIB);
    let source = rig.path("source");
    system("mkfs.ext4", &["-q", "-d", text(&source), text(&plain)]).unwrap();
    let words = [
        "convert",
        "--object",
        "secret,id=key,data=right",
        "-O",
        "luks",
        "-o",
        "key-secret=key,iter-time=10",
    ];
    let (from, to) = (plain, rig.path("vda.raw"));
    system("qemu-img", &[&words[..], &[text(&from), text(&to)]].concat()).unwrap();
    rig.ok(&["backup", "-m", "web1", "--format", "raw", "vda=vda.raw"]);

    rig.write("right", b"right\n");
    rig.write("wrong", b"wrong\n");
    let cat = |file: &'static str| {
        let words = ["files", "cat", "web1:/etc/web/web.conf", "--luks-password-file", file];
        rig.run(&with_kernel(&words))
    };
    let output = cat("wrong");
    assert!(
        stderr(&output).contains("the passphrase is wrong"),
        "{}",
        stderr(&output)
    );
    assert!(!output.status.success());
    let output = cat("right");
    assert_eq!(stdout(&output), "listen 192.0.2.7\n", "{}", stderr(&output));
}

fn children_of(process: u32) -> BTreeSet<u32> {
    let status = |path: PathBuf| std::fs::read_to_string(path.join("status")).unwrap_or_default();
    let numbers = std::fs::read_dir("/proc").unwrap().flatten();
    numbers
        .filter(|entry| {
            status(entry.path())
                .lines()
                .any(|line| line == format!("PPid:\t{process}"))
        })
        .filter_map(|entry| entry.file_name().to_string_lossy().parse().ok())
        .collect()
}

/// A command that is killed leaves no virtual machine.
#[test]
fn the_appliance_ends_with_its_command() {
    let rig = Rig::new();
    let image = new_image(&rig, "vda.raw", 128 * MIB);
    system("mkfs.btrfs", &["-q", text(&image)]).unwrap();
    rig.ok(&["backup", "-m", "web1", "vda=vda.raw"]);
    let mut command = rig.command(&with_kernel(&["files", "ls", "web1:whole:/"]));
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let program_of = |process: u32| std::fs::read_to_string(format!("/proc/{process}/comm")).unwrap_or_default();
    let mut machines = BTreeSet::new();
    wait_for("the appliance runs", || {
        machines = children_of(child.id());
        machines.retain(|process| program_of(*process).starts_with("qemu"));
        !machines.is_empty()
    });
    child.kill().unwrap();
    child.wait().unwrap();
    wait_for("the appliance has ended", || {
        machines.iter().all(|process| !program_of(*process).starts_with("qemu"))
    });
}

#[test]
fn an_appliance_without_a_kernel_is_refused_with_a_hint() {
    let rig = Rig::new();
    let image = new_image(&rig, "vda.raw", 128 * MIB);
    system("mkfs.btrfs", &["-q", text(&image)]).unwrap();
    rig.ok(&["backup", "-m", "web1", "vda=vda.raw"]);
    for (kernel, reason) in [
        ("missing", "read missing"),
        ("vda.raw", "vda.raw is no kernel of this architecture"),
    ] {
        let output = rig.code(1, &["files", "ls", "web1:whole:/", "--appliance-kernel", kernel]);
        assert!(stderr(&output).contains(reason), "{}", stderr(&output));
    }
}
