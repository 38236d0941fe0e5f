//! Replication between two hosts, with a real ssh and broken connections.

use std::time::Duration;

use holdfast_block::{Clock as _, SeededRandom, SystemClock};
use serde_json::{Value, json};

use super::sshd::{Program, Sshd, texts};
use super::{World, names_and_holds, zfs};
use crate::rig::noise;
use holdfast_test_kit::file_systems::system;

/// Number of broken connections for each file system.
const CUT_COUNT: u64 = 6;
const DISK_BYTES: usize = 2_000_000;

fn replicate(world: &World, words: &[&str], options: &[String]) -> Value {
    let words = [&["replicate"], words, &texts(options)].concat();
    let report = world.rig.report(&words);
    report["datasets"][0].clone()
}

#[test]
fn zfs_is_replicated_to_and_from_a_host_without_holdfast() {
    let Some(world) = World::on_zfs() else { return };
    let Some(sshd) = Sshd::start(Program::NotFound, None) else {
        return;
    };
    world.write("disk", 1, DISK_BYTES);
    world.take("a");
    let far = format!("root@127.0.0.1:{}", world.target);
    let sent = replicate(&world, &[&world.source, &far], &sshd.options());
    assert_eq!(sent["outcome"], "sent", "{sent}");
    // The receiving host has no Holdfast: its shell decompresses the stream.
    world.write("zeros", 1, 0);
    std::fs::File::create(world.folder.join("zeros"))
        .unwrap()
        .set_len(0)
        .unwrap();
    world.take("b");
    let sent = replicate(&world, &[&world.source, &far, "--compress", "on"], &sshd.options());
    assert_eq!(sent["outcome"], "sent", "{sent}");
    assert_eq!(world.held(&world.target), names_and_holds(&[("a", 0), ("b", 1)]));
    let onward = format!("{}/onward 2", world.above());
    for compress in ["off", "on"] {
        let words = [
            far.as_str(),
            onward.as_str(),
            "--compress",
            compress,
            "--snapshots",
            if compress == "off" { "a" } else { "*" },
        ];
        let fetched = replicate(&world, &words, &sshd.options());
        assert_eq!(fetched["outcome"], "sent", "{fetched}");
    }
    assert_eq!(world.names(&onward), ["a", "b"]);
    let status = world.rig.ok(&[
        &["replicate", "--status", &world.source, &far],
        &texts(&sshd.options())[..],
    ]
    .concat());
    assert!(status.contains("up to date"), "{status}");
    assert_eq!(
        world.rig.runtime_names(),
        [""; 0],
        "the connection has ended, and left no socket"
    );
    let (kind, text) = world.rig.error(
        1,
        &["replicate", &world.source, "127.0.0.1:tank/x", "--ssh-option", "Port=1"],
    );
    assert!(
        kind == "io" && text.contains("no connection to 127.0.0.1"),
        "{kind}: {text}"
    );
}

#[test]
fn datasets_are_replicated_between_two_hosts_with_holdfast() {
    for world in [World::on_btrfs(), World::on_zfs()] {
        let Some(world) = world else { continue };
        let Some(sshd) = Sshd::start(Program::Found, None) else {
            return;
        };
        world.write("disk", 1, DISK_BYTES);
        let file = std::fs::File::create(world.folder.join("text")).unwrap();
        std::io::Write::write_all(&mut &file, &b"much the same ".repeat(100_000)).unwrap();
        file.sync_all().unwrap();
        world.take("a");
        world.take("b");
        let far = format!("127.0.0.1:{}", world.target);
        let sent = replicate(&world, &[&world.source, &far, "--compress", "on"], &sshd.options());
        assert_eq!(
            (&sent["outcome"], &sent["common"]),
            (&json!("sent"), &json!("b")),
            "{sent}"
        );
        let (stream, link) = (&sent["streams"][0]["stream_bytes"], &sent["streams"][0]["link_bytes"]);
        assert!(link.as_u64().unwrap() + 1_000_000 < stream.as_u64().unwrap(), "{sent}");
        assert_eq!(world.held(&world.target), names_and_holds(&[("a", 0), ("b", 1)]));
        assert!(world.received("b", "disk") == noise(DISK_BYTES, 1));
        let onward = format!("{}-2", world.target);
        let fetched = replicate(&world, &[&far, &onward], &sshd.options());
        assert_eq!(fetched["outcome"], "sent", "{fetched}");
        assert_eq!(world.names(&onward), ["a", "b"]);
        assert_eq!(
            replicate(&world, &[&world.source, &far], &sshd.options())["outcome"],
            "up to date"
        );
    }
}

/// Waits until no receiver is running any more.
fn wait_for_the_end_of(pattern: &str) {
    let clock = SystemClock::new();
    while system("pgrep", &["-f", pattern]).is_ok() {
        assert!(clock.now() < Duration::from_secs(60), "{pattern} is still running");
        clock.sleep(Duration::from_millis(10));
    }
}

/// Breaks the connection repeatedly: each snapshot is received completely or not at all, and finally all of them are.
fn assert_survives_broken_connections(world: &World, program: Program<'_>, receiver: &str, seed: u64) {
    let Some(sshd) = Sshd::start(program, None) else { return };
    let proxy = sshd.breaking_proxy();
    let options = sshd.options_by(proxy.port);
    let far = format!("127.0.0.1:{}", world.target);
    let words = [&["replicate", &world.source, &far][..], &texts(&options)].concat();
    let mut random = SeededRandom::new(seed);
    let mut bytes = [0; 8];
    let taken = ["a", "b"];
    for (round, name) in taken.iter().enumerate() {
        world.write("disk", round as u64 + 1, DISK_BYTES);
        world.take(name);
        for _ in 0..CUT_COUNT / 2 {
            random.fill(&mut bytes);
            let cut = u64::from_le_bytes(bytes) % (DISK_BYTES as u64 - 100_000);
            proxy.break_after(cut);
            let output = world.rig.run(&words);
            assert_eq!(
                output.status.code(),
                Some(1),
                "seed {seed}, cut after {cut}: {output:?}"
            );
            let text = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
            assert!(text.contains("127.0.0.1"), "cut after {cut}: {text}");
            wait_for_the_end_of(receiver);
            if round > 0 || system("ls", &[&world.target]).is_ok() {
                assert_eq!(
                    world.names(&world.target),
                    taken[..round],
                    "seed {seed}, cut after {cut}"
                );
            }
        }
        proxy.break_after(u64::MAX);
        let output = world.rig.run(&words);
        assert!(matches!(output.status.code(), Some(0 | 3)), "{output:?}");
        assert_eq!(world.names(&world.target), taken[..=round]);
        assert!(world.received(name, "disk") == noise(DISK_BYTES, round as u64 + 1));
    }
    assert_eq!(world.held(&world.target), names_and_holds(&[("a", 0), ("b", 1)]));
}

#[test]
fn replication_to_zfs_survives_broken_connections() {
    let Some(world) = World::on_zfs() else { return };
    let receiver = format!("zfs receive -u {}", world.target);
    assert_survives_broken_connections(&world, Program::NotFound, &receiver, 11);
    let tag = zfs(&["get", "-H", "-o", "value", "userrefs", &world.full(&world.source, "b")]);
    assert_eq!(tag, "1");
}

#[test]
fn replication_to_btrfs_survives_broken_connections() {
    let Some(world) = World::on_btrfs() else { return };
    assert_survives_broken_connections(&world, Program::Found, "btrfs receive -q -e -C", 12);
}
