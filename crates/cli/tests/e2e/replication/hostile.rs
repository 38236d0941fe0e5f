//! Hosts that send other data than they announce: to a receiver that permits only adding, and to a host that fetches.

use std::path::Path;

use serde_json::{Value, json};

use super::append_only::{append_only_sshd, assert_refused, receiving, replicate};
use super::forged::Forged;
use super::sshd::{Program, Sshd, texts};
use super::{World, zfs};
use crate::rig::noise;
use holdfast_test_kit::file_systems::system;

const IDENTITY: &str = "11111111-2222-3333-4444-555555555555";

fn snapshots(target: &str) -> std::path::PathBuf {
    Path::new(target).join(".holdfast/snapshots")
}

/// All entries in the folder of a copy, hidden or not.
fn all_entries(target: &str) -> String {
    let snapshots = snapshots(target);
    system(
        "ls",
        &["-lAR", "--time-style=full-iso", &snapshots.display().to_string()],
    )
    .unwrap()
}

fn identity_of(target: &str, name: &str) -> String {
    let place = snapshots(target).join(name).display().to_string();
    let shown = system("btrfs", &["subvolume", "show", &place]).unwrap();
    let field = shown
        .lines()
        .find_map(|line| line.trim().strip_prefix("Received UUID:"));
    field.unwrap().trim().to_owned()
}

/// A block device that is unrelated to the copy.
struct Victim {
    device: String,
    _file: tempfile::NamedTempFile,
}

impl Victim {
    fn new() -> Self {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(1 << 20).unwrap();
        let device = system("losetup", &["-f", "--show", &file.path().display().to_string()]).unwrap();
        Self { device, _file: file }
    }

    fn is_untouched(&self) -> bool {
        std::fs::read(&self.device).unwrap().iter().all(|byte| *byte == 0)
    }
}

impl Drop for Victim {
    fn drop(&mut self) {
        system("losetup", &["-d", &self.device]).ok();
    }
}

/// Streams that access files outside of the received snapshot.
fn streams_accessing_other_files(victim: &Victim, outside: &str, old: &str) -> Vec<Vec<u8>> {
    let device = Path::new(&victim.device);
    let new = || Forged::subvolume("new", IDENTITY);
    vec![
        // A device, and data for it.
        new().device("x", device).write("x", b"WRITTEN BY THE SENDER").end(),
        new()
            .device("x", device)
            .rename("x", "y")
            .write("y", b"WRITTEN BY THE SENDER")
            .end(),
        // Existing snapshots.
        new().rename("../a", "../.a").end(),
        new().rename("../a", "mine").end(),
        new().unlink("../a/disk").end(),
        new().file("f").rename("f", "../a").end(),
        Forged::subvolume("a", old).file("disk").write("disk", b"forged").end(),
        Forged::subvolume("b2", old).file("disk").end(),
        Forged::subvolume("../b2", IDENTITY).end(),
        Forged::subvolume(".a", IDENTITY).end(),
        // Files of the host.
        new().symlink("l", outside).write("l", b"WRITTEN BY THE SENDER").end(),
        new()
            .symlink("l", "/")
            .write(&format!("l{outside}"), b"WRITTEN BY THE SENDER")
            .end(),
        new().file(outside).write(outside, b"WRITTEN BY THE SENDER").end(),
        new().symlink("l", outside).chmod("l", 0o777).end(),
        // Links of the parent.
        Forged::since(old, "new", IDENTITY)
            .write("link", b"WRITTEN BY THE SENDER")
            .end(),
        Forged::since(old, "new", IDENTITY)
            .rename("link", "l")
            .write("l", b"WRITTEN BY THE SENDER")
            .end(),
        Forged::since(IDENTITY, "new", "11111111-2222-3333-4444-666666666666").end(),
        // Two subvolumes, and data after the end of the stream.
        [new().end(), Forged::subvolume("more", old).end()].concat(),
    ]
}

/// A sender with a valid key may be compromised: it may write nothing except its snapshots.
#[test]
fn a_stream_that_accesses_files_outside_its_snapshot_is_refused() {
    let Some(world) = World::on_btrfs() else { return };
    let Some(sshd) = append_only_sshd(&world) else { return };
    let outside = tempfile::NamedTempFile::new().unwrap();
    let outside = outside.path().display().to_string();
    world.write("disk", 1, 1_000_000);
    std::os::unix::fs::symlink(&outside, world.folder.join("link")).unwrap();
    world.take("a");
    assert_eq!(replicate(&world, &sshd, 0)["outcome"], "sent");
    let victim = Victim::new();
    let before = (all_entries(&world.target), world.held(&world.target));
    for stream in streams_accessing_other_files(&victim, &outside, &identity_of(&world.target, "a")) {
        let text = assert_refused(&sshd, "btrfs", &receiving(&world.target), &stream);
        assert!(text.contains("the stream is refused"), "{text}");
        assert_eq!(world.held(&world.target), before.1);
        assert!(
            victim.is_untouched() && std::fs::read(&outside).unwrap().is_empty(),
            "{text}"
        );
    }
    // The next receiver removes a refused partial stream.
    assert_refused(&sshd, "btrfs", &receiving(&world.target), b"no stream");
    assert_eq!(all_entries(&world.target), before.0);
    world.take("b");
    assert_eq!(replicate(&world, &sshd, 0)["outcome"], "sent");
    assert!(world.received("b", "disk") == noise(1_000_000, 1));
}

/// Special files and set-user-ID bits are not received; everything else of a valid subvolume is.
#[test]
fn special_files_and_set_user_id_bits_are_not_received() {
    let Some(world) = World::on_btrfs() else { return };
    world.write("disk", 1, 100_000);
    let folder = world.folder.display().to_string();
    let make = format!(
        "cd '{folder}' && mkfifo fifo && mknod null c 1 3 && mkdir -p deep/er && python3 -c \
         'import socket; socket.socket(socket.AF_UNIX).bind(\"sock\")' && install -m 6755 /bin/true deep/tool && ln -s /etc deep/er/etc \
         && python3 -c 'import os; os.setxattr(\"disk\", \"user.note\", b\"hello\")'"
    );
    system("sh", &["-c", &make]).unwrap();
    world.take("a");
    let done = world.replicate(3, &[]);
    assert_eq!(done["outcome"], "sent", "{done}");
    let notes = done["notes"].to_string();
    for part in ["fifo", "deep/tool"] {
        assert!(notes.contains(part), "{part}: {notes}");
    }
    let copy = snapshots(&world.target).join("a");
    let at = |name: &str| copy.join(name);
    for name in ["fifo", "null", "sock"] {
        assert!(at(name).symlink_metadata().is_err(), "{name}");
    }
    let mode = std::os::unix::fs::MetadataExt::mode(&at("deep/tool").metadata().unwrap());
    assert_eq!(mode & 0o7777, 0o755);
    assert_eq!(std::fs::read_link(at("deep/er/etc")).unwrap(), Path::new("/etc"));
    let script = "import os, sys; print(os.getxattr(sys.argv[1], 'user.note'))";
    let noted = system("python3", &["-c", script, &at("disk").display().to_string()]);
    assert!(noted.unwrap().contains("hello"));

    // Files that were not received are renamed, changed and removed at the source.
    system(
        "sh",
        &[
            "-c",
            &format!("cd '{folder}' && mv fifo deep/fifo && chmod 600 deep/fifo && chown 1 null && ln null null2"),
        ],
    )
    .unwrap();
    world.take("b");
    world.replicate(0, &[]);
    let change = format!(
        "cd '{folder}' && rm deep/fifo null sock && mv deep/er er && touch null2 && mv deep new && echo x > new/x"
    );
    system("sh", &["-c", &change]).unwrap();
    world.take("c");
    assert_eq!(world.replicate(0, &[])["outcome"], "sent");
    let copy = snapshots(&world.target).join("c");
    assert!(copy.join("new/x").exists() && copy.join("er/etc").symlink_metadata().is_ok());
    assert!(world.received("c", "disk") == noise(100_000, 1));
}

/// A `holdfast` that answers like an attacker who controls the sending host.
fn forged_peer(stream: &[u8], name: &str, kind: &str) -> (tempfile::TempDir, String) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("stream");
    std::fs::File::create(&file)
        .and_then(|mut file| std::io::Write::write_all(&mut file, stream))
        .unwrap();
    let identity = if kind == "btrfs" { IDENTITY } else { "77" };
    let snapshot = json!({ "name": name, "identity": identity, "time_s": 1_700_000_000, "is_bookmark": false, "hold_count": 0, "record": null });
    let script = format!(
        "#!/bin/sh\nread -r line\ncase \"$line\" in\n\
         *abilities*) echo '{{\"done\":{{\"bookmarks\":false,\"sends_as_stored\":false,\"joins\":true}}}}';;\n\
         *datasets*) echo '{{\"done\":[{{\"name\":\"SOURCE\",\"snapshots\":[{snapshot}],\"partial\":null,\"is_encrypted\":false}}]}}' | \
         sed \"s|SOURCE|$(echo \"$line\" | sed 's/.*\"name\":\"\\([^\"]*\\)\".*/\\1/')|\";;\n\
         *'\"send\"'*) cat '{}';;\n*) echo '{{\"done\":null}}';;\nesac\n",
        file.display()
    );
    let program = folder.path().join("forging");
    holdfast_test_kit::write_program(&program, &script);
    let program = program.display().to_string();
    (folder, program)
}

fn fetch(world: &World, sshd: &Sshd, source: &str) -> Value {
    let far = format!("127.0.0.1:{source}");
    let options = sshd.options();
    let words = [
        &["replicate", &far, &world.target, "--compress", "off"],
        &texts(&options)[..],
    ]
    .concat();
    world.rig.json(1, &words)["report"]["datasets"][0].clone()
}

/// A fetching host does not trust the sending host either.
#[test]
fn a_malicious_sender_cannot_write_outside_the_copy() {
    let Some(world) = World::on_btrfs() else { return };
    let victim = Victim::new();
    let new = || Forged::subvolume("new", IDENTITY);
    for stream in [
        new()
            .device("x", Path::new(&victim.device))
            .write("x", b"WRITTEN BY THE SOURCE")
            .end(),
        new().rename("../a", "../.a").end(),
        Forged::subvolume("other", IDENTITY).end(),
        Forged::subvolume("new", "11111111-2222-3333-4444-666666666666").end(),
    ] {
        let (_folder, program) = forged_peer(&stream, "new", "btrfs");
        let Some(sshd) = Sshd::start(Program::NotFound, Some(&program)) else {
            return;
        };
        let done = fetch(&world, &sshd, "/srv/vms");
        assert_eq!(done["outcome"], "failed", "{done}");
        assert!(done.to_string().contains("the stream is refused"), "{done}");
        assert!(victim.is_untouched());
        assert_eq!(world.names(&world.target), [""; 0]);
    }
}

/// Streams with properties, with several snapshots, or with another snapshot are not received from another host.
#[test]
fn properties_are_not_fetched() {
    let Some(world) = World::on_zfs() else { return };
    zfs(&["create", "-p", "-o", "canmount=off", &world.above()]);
    zfs(&["set", "setuid=on", &world.source]);
    for name in ["a", "b"] {
        world.take(name);
    }
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("stream").display().to_string();
    for words in [
        "-p SOURCE@a",
        "-R SOURCE@b",
        "-I @a SOURCE@b",
        "SOURCE@b",
        "-i @a SOURCE@b",
        "SOURCE@a",
    ] {
        let line = format!("zfs send {} > {file}", words.replace("SOURCE", &world.source));
        system("sh", &["-c", &line]).unwrap();
        // Its guid does not match the announced one either.
        let (_folder, program) = forged_peer(&std::fs::read(&file).unwrap(), "a", "zfs");
        let Some(sshd) = Sshd::start(Program::NotFound, Some(&program)) else {
            return;
        };
        let done = fetch(&world, &sshd, "tank/vms");
        assert!(done.to_string().contains("the stream is refused"), "{words}: {done}");
        assert!(system("zfs", &["list", &world.target]).is_err(), "{words}");
    }
}

/// A sender may neither change records of snapshots that it has not sent, nor holds of others.
#[test]
fn a_sender_cannot_change_records_and_holds_of_others() {
    for world in [World::on_zfs(), World::on_btrfs()] {
        let Some(world) = world else { continue };
        let kind = world.file_system.name();
        if kind == "zfs" {
            zfs(&["create", "-p", "-o", "canmount=off", &world.above()]);
        }
        let Some(sshd) = append_only_sshd(&world) else { return };
        world.take("a");
        assert_eq!(replicate(&world, &sshd, 0)["outcome"], "sent");
        // A snapshot of another program, which retention keeps, and the hold of a replication from here to another
        // host.
        let other_tag = "holdfast-replicate-0123456789abcdef";
        if kind == "zfs" {
            zfs(&["snapshot", &world.full(&world.target, "own")]);
            zfs(&["hold", other_tag, &world.full(&world.target, "own")]);
        } else {
            let place = snapshots(&world.target).join("own").display().to_string();
            system("btrfs", &["subvolume", "snapshot", "-r", &world.target, &place]).unwrap();
            world
                .rig
                .ok(&["host", "hold", &world.full(&world.target, "own"), "--tag", other_tag]);
        }
        let list = || {
            let report = world.rig.report(&["host", "list", &format!("{kind}:{}", world.target)]);
            report["datasets"][0]["snapshots"].clone()
        };
        let before = list();
        let record = json!({ "schema": 1, "program": "x", "time": "2001-01-01T00:00:00Z", "machines": [], "consistency": "", "is_whole": true });
        for identity in ["", "1"] {
            let forged = json!({ "name": "own", "identity": identity, "time_s": 978_307_200, "is_bookmark": false, "hold_count": 0,
                "record": record.to_string() });
            let request = json!({ "settle": { "dataset": world.target, "snapshots": [forged], "is_packed": false } });
            sshd.run(
                "holdfast peer 1",
                format!("{}\n", json!({ "kind": kind, "ask": request })).as_bytes(),
            );
            assert_eq!(list(), before, "{identity:?}");
        }
        // A request for the existing hold succeeds and changes nothing; the other requests are refused.
        let request =
            json!({ "keep": { "dataset": world.target, "snapshot": "a", "tag": other_tag, "means": "Hold" } });
        let (code, text) = sshd.run(
            "holdfast peer 1",
            format!("{}\n", json!({ "kind": kind, "ask": request })).as_bytes(),
        );
        assert_eq!(code, Some(0), "{text}");
        assert_eq!(list(), before);
        for means in ["HoldToo", "Bookmark"] {
            let request =
                json!({ "keep": { "dataset": world.target, "snapshot": "own", "tag": other_tag, "means": means } });
            assert_refused(&sshd, kind, &request, b"");
        }
        assert_eq!(list(), before);
    }
}
