//! Files inside the guests' file systems, read from snapshots.

use std::io::Write as _;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, PermissionsExt as _, symlink};
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use holdfast_block::{Clock as _, SystemClock};
use serde_json::Value;

use crate::host::{system, text};
use crate::program::{stderr, stdout};
use crate::rig::{Rig, noise};

const MIB: u64 = 1 << 20;

fn fill(folder: &Path) {
    let write = |name: &str, bytes: &[u8]| {
        let path = folder.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::File::create(path).unwrap().write_all(bytes).unwrap();
    };
    write("etc/web/web.conf", b"listen 192.0.2.7\n");
    write("etc/web/sites/first.conf", b"first\n");
    write("etc/fstab", b"/dev/vda1 / ext4\n");
    write("var/data.bin", &noise(2_500_000, 5));
    write("var/\u{1b}[31mred", b"");
    write("var/sparse", b"start");
    let sparse = std::fs::File::options()
        .write(true)
        .open(folder.join("var/sparse"))
        .unwrap();
    sparse.write_all_at(b"end", 30 * MIB).unwrap();
    symlink("etc/web/web.conf", folder.join("current")).unwrap();
    symlink("/etc/web", folder.join("web")).unwrap();
    std::fs::set_permissions(folder.join("etc/fstab"), std::fs::Permissions::from_mode(0o4751)).unwrap();
    for name in ["etc/fstab", "etc", "current"] {
        system("touch", &["-h", "-d", "2024-02-29T12:34:56Z", text(&folder.join(name))]).unwrap();
    }
}

/// Makes a file system in a file of the rig.
fn file_system(rig: &Rig, name: &str, size_bytes: u64, program: &str, words: &[&str]) {
    let file = std::fs::File::create(rig.path(name)).unwrap();
    file.set_len(size_bytes).unwrap();
    let path = rig.path(name);
    let made = system(program, &[words, &[text(&path)]].concat());
    made.unwrap_or_else(|reason| panic!("{program}: {reason} (scripts/setup installs it)"));
}

/// A rig with a snapshot of the machine web1: vda has an ext4 and a FAT in a GPT, vdb is a btrfs without a table.
fn rig() -> Rig {
    let rig = Rig::new();
    std::fs::create_dir(rig.path("source")).unwrap();
    fill(&rig.path("source"));
    let words = [
        "-q",
        "-F",
        "-L",
        "root",
        "-d",
        text(&rig.path("source")).to_owned().leak(),
    ];
    file_system(&rig, "part1", 48 * MIB, "mkfs.ext4", &words);
    file_system(&rig, "part2", 2 * MIB, "mkfs.fat", &["-n", "EFI"]);
    let folder = rig.path("source/etc");
    system("mcopy", &["-s", "-i", text(&rig.path("part2")), text(&folder), "::"]).unwrap();
    file_system(&rig, "vdb.raw", 128 * MIB, "mkfs.btrfs", &["-q"]);
    let disk = std::fs::File::create(rig.path("vda.raw")).unwrap();
    disk.set_len(60 * MIB).unwrap();
    system(
        "sgdisk",
        &["-n", "1:2048:+48M", "-n", "2:0:+2M", text(&rig.path("vda.raw"))],
    )
    .unwrap();
    disk.write_all_at(&rig.read("part1"), MIB).unwrap();
    disk.write_all_at(&rig.read("part2"), 49 * MIB).unwrap();
    rig.ok(&["backup", "-m", "web1", "vda=vda.raw", "vdb=vdb.raw"]);
    rig
}

fn names(report: &Value) -> Vec<&str> {
    let files = report["files"].as_array().unwrap().iter();
    files.map(|file| file["path"].as_str().unwrap()).collect()
}

#[test]
fn volumes_and_directories_are_listed() {
    let rig = rig();
    let report = rig.report(&["files", "ls", "web1"]);
    let volumes = report["volumes"].as_array().unwrap();
    let shown = |volume: &Value| {
        let field = |name: &str| volume[name].to_string().replace('"', "");
        format!(
            "{}:{} {} {}",
            field("disks"),
            field("name"),
            field("content"),
            field("is_readable")
        )
    };
    let shown: Vec<String> = volumes.iter().map(shown).collect();
    assert_eq!(
        shown,
        ["[vda]:1 ext4 true", "[vda]:2 fat true", "[vdb]:whole btrfs true"]
    );
    assert_eq!(volumes[0]["label"], "root");
    let text = rig.ok(&["files", "ls", "web1:vda"]);
    assert!(text.contains("EFI") && !text.contains("btrfs"), "{text}");
    assert_eq!(
        rig.ok(&["files", "ls", "web1:1:/"]),
        "current\netc/\nlost+found/\nvar/\nweb\n"
    );
    assert_eq!(
        rig.ok(&["files", "ls", "web1:/var"]),
        "\\u{1b}[31mred\ndata.bin\nsparse\n"
    );
    let long = rig.ok(&["files", "ls", "-l", "web1:vda:1:/etc/fstab"]);
    assert!(
        long.starts_with("-rwsr-x--x ") && long.contains(" 17 ") && long.ends_with(" fstab\n"),
        "{long}"
    );
    let report = rig.report(&["files", "ls", "web1:vda:1:/etc", "--recursive"]);
    assert_eq!(
        names(&report),
        [
            "/etc/fstab",
            "/etc/web",
            "/etc/web/sites",
            "/etc/web/web.conf",
            "/etc/web/sites/first.conf"
        ]
    );
    assert_eq!(report["files"][0]["mode"], "4751");
    assert_eq!(report["files"][0]["modified"], "2024-02-29T12:34:56Z");
    // Links in a path lead inside the volume.
    assert_eq!(rig.ok(&["files", "ls", "web1:1:/web/"]), "sites/\nweb.conf\n");
    assert_eq!(
        rig.ok(&["files", "find", "web1:1:/", "*.conf"]),
        "/etc/web/web.conf\n/etc/web/sites/first.conf\n"
    );
    let found = rig.report(&["files", "find", "web1:2:/", "f*"]);
    assert_eq!(names(&found), ["/etc/fstab", "/etc/web/sites/first.conf"]);
}

#[test]
fn a_file_is_written_to_standard_output() {
    let rig = rig();
    let output = rig.code(0, &["files", "cat", "web1:/var/data.bin"]);
    assert!(output.stdout == rig.read("source/var/data.bin"), "the bytes differ");
    assert_eq!(rig.ok(&["files", "cat", "web1:1:/current"]), "listen 192.0.2.7\n");
    let sparse = rig.code(0, &["files", "cat", "web1:/var/sparse"]).stdout;
    assert!(sparse == rig.read("source/var/sparse"), "the bytes differ");
    assert_eq!(rig.code(2, &["files", "cat", "web1"]).stdout, b"");
    assert!(stderr(&rig.code(1, &["files", "cat", "web1:/var"])).contains("not a regular file"));
}

#[test]
fn a_tree_is_restored_and_nothing_is_overwritten() {
    let rig = rig();
    let planned = rig.report(&["files", "restore", "web1:1:/", "out", "--dry-run"]);
    assert!(!rig.path("out").exists());
    let done = rig.report(&["files", "restore", "web1:1:/", "out"]);
    for field in ["file_count", "directory_count", "link_count", "size_bytes"] {
        assert_eq!(planned[field], done[field], "{field}");
    }
    std::fs::remove_dir(rig.path("out/lost+found")).unwrap();
    system(
        "diff",
        &[
            "-r",
            "--no-dereference",
            text(&rig.path("source")),
            text(&rig.path("out")),
        ],
    )
    .unwrap();
    for name in ["etc/fstab", "etc", "current"] {
        let [restored, source] =
            ["out", "source"].map(|folder| rig.path(folder).join(name).symlink_metadata().unwrap());
        assert_eq!(
            (restored.mtime(), restored.mode()),
            (source.mtime(), source.mode()),
            "{name}"
        );
    }
    let sparse = rig.path("out/var/sparse").metadata().unwrap();
    assert!(sparse.blocks() * 512 < MIB, "{} blocks", sparse.blocks());
    // A second restore replaces nothing, and says so.
    rig.write("out/etc/fstab", b"changed");
    std::fs::remove_file(rig.path("out/var/data.bin")).unwrap();
    let report = rig.json(1, &["files", "restore", "web1:1:/", "out"])["report"].clone();
    assert_eq!(report["file_count"], 1, "only the missing file is restored");
    assert_eq!(rig.read("out/etc/fstab"), b"changed");
    let failures = report["failures"].as_array().unwrap();
    assert!(
        failures.iter().any(|failure| failure["path"] == "/etc/fstab"),
        "{report}"
    );
    rig.ok(&["files", "restore", "web1:1:/etc", "out", "--force"]);
    assert_eq!(rig.read("out/etc/fstab"), rig.read("source/etc/fstab"));
    assert!(rig.names("out/etc").iter().all(|name| !name.contains("partial")));
}

#[test]
fn what_cannot_be_read_or_found_is_an_error_with_a_hint() {
    let rig = rig();
    let output = rig.code(1, &["files", "ls", "web1:vdb:/etc", "--reader", "process"]);
    let message = stderr(&output);
    assert!(
        message.contains("holds btrfs") && message.contains("virtual machine"),
        "{message}"
    );
    let output = rig.code(1, &["files", "cat", "web1:/missing", "--reader", "process"]);
    let message = stderr(&output);
    assert!(
        message.contains("no volume has /missing (not searched: vdb:whole: btrfs)"),
        "{message}"
    );
    let (kind, message) = rig.error(1, &["files", "ls", "web1:/etc"]);
    assert_eq!(kind, "ambiguous");
    assert!(message.contains("vda:1, vda:2"), "{message}");
    assert_eq!(rig.error(1, &["files", "ls", "web1:vda:7:/"]).0, "not-found");
    assert_eq!(rig.error(1, &["files", "ls", "web1:vdc:/"]).0, "not-found");
    assert_eq!(rig.error(2, &["files", "restore", "web1", "out"]).0, "usage");
    assert_eq!(rig.error(2, &["files", "ls", "web1:a:b:c"]).0, "usage");
    assert_eq!(rig.error(2, &["files", "cat", "web1:1:/etc/fstab"]).0, "usage");
}

/// A hostile directory has a link and a directory of the same name: what is in the directory must not be written
/// through the link.
#[test]
fn names_and_links_of_a_guest_do_not_lead_out_of_the_target() {
    let rig = Rig::new();
    rig.write("source/trap1/victim", b"overwritten");
    rig.write("outside/victim", b"safe");
    symlink(rig.path("outside"), rig.path("source/trap0")).unwrap();
    rig.write("source/evil", b"");
    let words = [
        "-q",
        "-F",
        "-O",
        "^metadata_csum",
        "-d",
        text(&rig.path("source")).to_owned().leak(),
    ];
    file_system(&rig, "disk.raw", 8 * MIB, "mkfs.ext4", &words);
    let replace = |bytes: &mut [u8], from: &[u8], to: &[u8]| {
        let at = bytes.windows(from.len()).position(|part| part == from).unwrap();
        bytes[at..at + to.len()].copy_from_slice(to);
    };
    let mut bytes = rig.read("disk.raw");
    // The length of the name and the kind stand before a name in a directory.
    replace(&mut bytes, b"\x05\x02trap1", b"\x05\x02trap0");
    rig.write("twice.raw", &bytes);
    rig.ok(&["backup", "-m", "twice", "vda=twice.raw"]);
    let report = rig.json(1, &["files", "restore", "twice:whole:/", "out"])["report"].clone();
    assert_eq!(report["failure_count"], 1, "{report}");
    assert_eq!(rig.read("outside/victim"), b"safe");
    replace(&mut bytes, b"\x04\x01evil", b"\x04\x01../x");
    rig.write("slash.raw", &bytes);
    rig.ok(&["backup", "-m", "slash", "vda=slash.raw"]);
    let report = rig.json(1, &["files", "restore", "slash:whole:/", "out2"])["report"].clone();
    assert!(
        report["failures"][0]["reason"]
            .as_str()
            .unwrap()
            .contains("invalid name"),
        "{report}"
    );
    assert!(!rig.path("x").exists());
}

/// The process that reads a file system has no rights: the kernel forbids it almost all system calls.
#[test]
fn the_reader_is_confined() {
    let rig = Rig::empty();
    let mut command = rig.command(&["files-reader"]);
    let mut child = command.stdin(Stdio::piped()).spawn().unwrap();
    let status = format!("/proc/{}/status", child.id());
    let is_confined = (0..200).any(|_| {
        SystemClock::new().sleep(Duration::from_millis(20));
        let status = std::fs::read_to_string(&status).unwrap_or_default();
        status.lines().any(|line| line.split_whitespace().eq(["Seccomp:", "2"]))
    });
    drop(child.stdin.take());
    let output = child.wait_with_output().unwrap();
    assert!(is_confined, "seccomp is not active");
    assert_eq!((output.status.code(), stdout(&output)), (Some(0), String::new()));
}

/// Reports of the verbs that have one.
pub(crate) fn reports() -> Vec<(&'static str, Value)> {
    let rig = rig();
    vec![
        ("files ls", rig.report(&["files", "ls", "web1"])),
        ("files ls", rig.report(&["files", "ls", "web1:1:/"])),
        ("files find", rig.report(&["files", "find", "web1:1:/", "*"])),
        ("files restore", {
            rig.ok(&["files", "restore", "web1:1:/etc", "out"]);
            rig.json(1, &["files", "restore", "web1:1:/etc", "out"])["report"].clone()
        }),
    ]
}
