//! A process that is killed while it puts objects leaves complete objects and no other visible ones.
//!
//! The test starts itself again as a child that puts objects without end, kills the child after a random time, and
//! checks the store. `HOLDFAST_SEED` replays.
#![expect(clippy::disallowed_methods, reason = "the process that is killed is a child")]

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, SystemTime};

use holdfast_repo::store::{DirectoryStore, ObjectKind, ObjectName, Put, Store};
use tempfile::TempDir;

const FOLDER_VARIABLE: &str = "HOLDFAST_TEST_CRASH_FOLDER";
const ROUNDS: u64 = 25;

/// Each word of an object consists of the number and the length of the object.
fn contents(number: u64) -> Vec<u8> {
    let words = 1 + (number * 7919) % 60_000;
    let word = (number << 32) | words;
    (0..words).flat_map(|_| word.to_le_bytes()).collect()
}

fn name(number: u64) -> ObjectName {
    ObjectName::new(ObjectKind::Pack, &format!("{:02x}-{number}", number % 256)).unwrap()
}

/// The child process; no test of its own.
#[test]
fn child_that_puts_until_it_is_killed() {
    let Ok(folder) = std::env::var(FOLDER_VARIABLE) else {
        return;
    };
    let store = DirectoryStore::create(Path::new(&folder)).unwrap();
    let mut first = 0;
    store
        .list(ObjectKind::Pack, &mut |_, _| {
            first += 1;
            Ok(())
        })
        .unwrap();
    for number in first.. {
        let bytes = contents(number);
        let put = if number % 2 == 0 {
            store.put(&name(number), &bytes).unwrap()
        } else {
            let mut writer = store.create(&name(number)).unwrap();
            // Small pieces, so that objects are incomplete most of the time.
            for piece in bytes.chunks(32) {
                writer.append(piece).unwrap();
            }
            writer.commit().unwrap()
        };
        assert_eq!(put, Put::Created);
        println!("put {number}");
    }
}

#[test]
fn every_visible_object_is_whole_after_a_kill() {
    let seed: u64 = std::env::var("HOLDFAST_SEED").map_or(1, |seed| seed.parse().unwrap());
    println!("HOLDFAST_SEED={seed}");
    let folder = TempDir::new().unwrap();
    let root = folder.path().join("repository");
    let mut reported = BTreeSet::new();
    let mut left_behind = 0;
    for round in 0..ROUNDS {
        let delay_us = (seed.wrapping_add(round).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) % 40_000;
        reported.extend(put_and_kill(&root, Duration::from_micros(delay_us)));
        left_behind += std::fs::read_dir(root.join("tmp")).unwrap().count();
        let store = DirectoryStore::open(&root).unwrap();
        let mut seen = BTreeSet::new();
        store
            .list(ObjectKind::Pack, &mut |found, length| {
                let number = found.name().split_once('-').unwrap().1.parse().unwrap();
                assert_eq!(found, name(number));
                assert!(store.get(&found, length)? == contents(number), "{found} is incomplete");
                seen.insert(number);
                Ok(())
            })
            .unwrap();
        assert!(
            reported.is_subset(&seen),
            "an object that was reported as put is missing"
        );
        // There may be one more object, if the kill came before its report.
        assert!(seen.iter().copied().eq(0..seen.len() as u64));
        store
            .clean_temporary(SystemTime::UNIX_EPOCH + Duration::from_secs(1 << 40))
            .unwrap();
        assert_eq!(std::fs::read_dir(root.join("tmp")).unwrap().count(), 0);
        let mut foreign_files = 0;
        store
            .foreign_files(&mut |_| {
                foreign_files += 1;
                Ok(())
            })
            .unwrap();
        assert_eq!(foreign_files, 0);
    }
    println!("{} objects, {left_behind} temporary files left behind", reported.len());
    assert!(
        reported.len() as u64 > ROUNDS && left_behind > 0,
        "the kills came too early or too late"
    );
}

/// Starts the child, kills it `delay` after its first report, and returns the numbers that it reported.
fn put_and_kill(root: &Path, delay: Duration) -> Vec<u64> {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "store_crash::child_that_puts_until_it_is_killed",
            "--nocapture",
        ])
        .env(FOLDER_VARIABLE, root)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let number = |line: &str| {
        line.rsplit_once("put ")
            .and_then(|(_, number)| number.parse::<u64>().ok())
    };
    let mut reported: Vec<u64> = Vec::new();
    while reported.is_empty() {
        reported.extend(number(&lines.next().expect("the child reports").unwrap()));
    }
    std::thread::sleep(delay);
    child.kill().unwrap();
    child.wait().unwrap();
    // The kill may truncate the last line: only complete numbers count. (A truncated number is smaller, and was put
    // before.)
    reported.extend(lines.map_while(Result::ok).filter_map(|line| number(&line)));
    reported
}
