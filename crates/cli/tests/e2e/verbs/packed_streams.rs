//! Packed streams that were changed: a wrong stream is never returned without an error.

use std::fs::File;
use std::io::Read as _;
use std::process::Stdio;

use crate::host::{system, text};
use crate::program::stderr;
use crate::rig::{Rig, noise};

const MIB: usize = 1 << 20;

/// The blocks of a stream that `compress` has packed, and the index after them.
fn parts(packed: &[u8]) -> (Vec<&[u8]>, &[u8]) {
    let number = |at: usize| u32::from_le_bytes(packed[at..at + 4].try_into().unwrap()) as usize;
    let mut blocks = Vec::new();
    let mut at = 0;
    if packed.starts_with(&[0x1f, 0x8b]) {
        // The size field of an index member is 0.
        while number(at + 20) > 0 {
            blocks.push(&packed[at..at + number(at + 16)]);
            at += number(at + 16);
        }
    } else {
        let count = number(packed.len() - 9);
        for entry in 0..count {
            let length = number(packed.len() - 9 - 12 * (count - entry));
            blocks.push(&packed[at..at + length]);
            at += length;
        }
    }
    (blocks, &packed[at..])
}

/// Regression: each block is valid by itself, so a lost block was not detected when the stream was unpacked.
#[test]
fn every_verb_reports_lost_or_foreign_blocks_as_damage() {
    let rig = Rig::empty();
    let bytes = noise(9 * MIB, 41);
    for option in ["--gzip", "--zstd"] {
        let whole = rig.run_with(&["compress", option], &bytes).stdout;
        let (blocks, index) = parts(&whole);
        assert!(blocks.len() > 2, "{option}");
        let swapped = [&[blocks[1], blocks[0]][..], &blocks[2..]].concat();
        for (what, file) in [
            ("a first copy that was cut", [blocks[0], &whole].concat()),
            ("a lost block", [blocks[0], &blocks[2..].concat(), index].concat()),
            ("no first block", [&blocks[1..].concat(), index].concat()),
            ("swapped blocks", [&swapped.concat(), index].concat()),
            ("an index alone", index.to_vec()),
            (
                "a lost block, and a whole stream",
                [blocks[0], &blocks[2..].concat(), index, &whole].concat(),
            ),
        ] {
            rig.write("changed", &file);
            let output = rig.run(&["compress", "-d", "changed"]);
            assert_eq!(output.status.code(), Some(5), "{option}: {what}: {}", stderr(&output));
            let (kind, message) = rig.error(5, &["archive", "check", "changed"]);
            assert_eq!(kind, "damage", "{option}: {what}: {message}");
        }
        rig.write("joined", &[&whole[..], &whole].concat());
        rig.ok(&["archive", "check", "joined"]);
        let output = rig.run(&["compress", "-d", "joined"]);
        assert!(output.status.success() && output.stdout == [&bytes[..], &bytes].concat());
    }
}

/// Regression: this verb did not exit with the code for damage, on which scripts rely.
#[test]
fn every_verb_reports_a_damaged_block_as_damage() {
    let rig = Rig::empty();
    let bytes = noise(9 * MIB, 42);
    for option in ["--gzip", "--zstd"] {
        let mut packed = rig.run_with(&["compress", option], &bytes).stdout;
        packed[5 * MIB] ^= 1;
        rig.write("damaged", &packed);
        let mut hints = Vec::new();
        for words in [
            &["archive", "check", "damaged"][..],
            &["archive", "read", "damaged", "--offset", "4M", "--length", "2M"],
            &["compress", "-d", "damaged"],
        ] {
            let output = rig.code(5, words);
            let message = stderr(&output);
            hints.extend(message.lines().find(|line| line.starts_with("hint")).map(str::to_owned));
        }
        assert!(
            hints.len() == 3 && hints.iter().all(|hint| *hint == hints[0]),
            "{hints:?}"
        );
        // Undamaged blocks can be read.
        let output = rig.code(0, &["archive", "read", "damaged", "--length", "2M"]);
        assert!(output.stdout == bytes[..2 * MIB], "{option}");
    }
}

/// Regression: `archive check` used the index, and `compress -d` the headers of the blocks: some streams passed the
/// check and could not be unpacked.
#[test]
fn a_stream_that_passes_the_check_can_be_unpacked() {
    let rig = Rig::empty();
    let whole = rig.run_with(&["compress", "--gzip"], &noise(2 * MIB, 43)).stdout;
    let (blocks, index) = parts(&whole);
    let index_at = whole.len() - index.len();
    for (what, at) in [
        ("length of a block's member", 16),
        ("length of a block", blocks[0].len() + 22),
        ("CRC-32 of the index", index_at + index.len() - 62 - 8),
        ("CRC-32 of its last member", whole.len() - 8),
        ("what is packed in its last member", whole.len() - 10),
        ("size field of its last member", whole.len() - 62 + 20),
    ] {
        let mut changed = whole.clone();
        changed[at] ^= 4;
        rig.write("changed", &changed);
        let (kind, message) = rig.error(5, &["archive", "check", "changed"]);
        assert_eq!(kind, "damage", "{what}: {message}");
        let output = rig.run(&["compress", "-d", "changed"]);
        assert_eq!(output.status.code(), Some(5), "{what}: {}", stderr(&output));
    }
}

/// A folder that begins with a link is not a machine archive, and its packed stream is checked nevertheless.
#[test]
fn a_packed_folder_with_links_is_checked_as_a_stream() {
    let rig = Rig::empty();
    std::fs::create_dir(rig.path("folder")).unwrap();
    std::os::unix::fs::symlink("elsewhere", rig.path("folder/a")).unwrap();
    rig.write("folder/b", &noise(MIB, 48));
    let (folder, tape) = (rig.path("folder"), rig.path("folder.tar"));
    let words = ["-cf", text(&tape), "--sort=name", "-C", text(&folder), "."];
    system("tar", &words).unwrap();
    for packing in ["--zstd", "--gzip"] {
        let packed = rig.run_with(&["compress", packing], &rig.read("folder.tar")).stdout;
        rig.write("packed", &packed);
        rig.code(0, &["archive", "check", "packed"]);
        let mut damaged = packed;
        damaged[70_000] ^= 1;
        rig.write("packed", &damaged);
        rig.code(5, &["archive", "check", "packed"]);
    }
}

/// zstd does not show that another frame should follow; a stream that may be truncated is unpacked with a warning.
#[test]
fn every_verb_warns_of_a_zstd_stream_that_may_be_truncated() {
    let rig = Rig::empty();
    let bytes = noise(9 * MIB, 47);
    let whole = rig.run_with(&["compress", "--zstd"], &bytes).stdout;
    let (blocks, _) = parts(&whole);
    for (what, file, code) in [
        ("whole", whole.clone(), 0),
        ("cut", whole[..blocks[0].len()].to_vec(), 3),
        (
            "of zstd",
            rig.run_with(&["compress", "--zstd"], &bytes[..MIB]).stdout,
            0,
        ),
    ] {
        rig.write("packed.zst", &file);
        let output = rig.run(&["compress", "-d", "packed.zst"]);
        assert_eq!(output.status.code(), Some(code), "{what}: {}", stderr(&output));
        assert_eq!(stderr(&output).contains("a part is missing"), code == 3, "{what}");
        assert!(!output.stdout.is_empty(), "{what}");
    }
}

/// Regression: a file that was truncated while it was read was packed as if it were complete.
#[test]
fn a_file_truncated_while_it_is_packed_is_reported() {
    let rig = Rig::empty();
    rig.write("disk.raw", &noise(48 * MIB, 44));
    for option in ["--gzip", "--zstd"] {
        let mut child = rig
            .command(&["compress", option, "--threads", "1", "disk.raw"])
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        // The program blocks on the full pipe before it has read all of the file.
        let mut start = [0; 100];
        child.stdout.as_mut().unwrap().read_exact(&mut start).unwrap();
        let disk = File::options().write(true).open(rig.path("disk.raw")).unwrap();
        disk.set_len(47 * MIB as u64).unwrap();
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{option}: {}", stderr(&output));
        assert!(
            stderr(&output).contains("cut off while it was read"),
            "{}",
            stderr(&output)
        );
        if option == "--gzip" {
            rig.write("packed", &[&start[..], &output.stdout].concat());
            rig.error(5, &["archive", "check", "packed"]);
        }
        disk.set_len(48 * MIB as u64).unwrap();
    }
}
