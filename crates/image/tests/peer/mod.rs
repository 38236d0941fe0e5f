//! QEMU as the peer: every image that one side writes, the other must read.

#![allow(dead_code, unreachable_pub, reason = "each test program uses its part")]
#![expect(clippy::disallowed_methods, reason = "tests run the peer")]

use std::path::Path;
use std::process::{Command, Output};

use holdfast_block::{BlockDevice, ExtentKind, for_each_extent, to_usize};

fn run(program: &str, arguments: &[&str]) -> Output {
    match Command::new(program).args(arguments).output() {
        Ok(output) => output,
        Err(error) => panic!("these tests need {program} (Debian package qemu-utils): {error}"),
    }
}

/// Runs qemu-img, which must succeed; gives what it printed.
pub fn qemu_img(arguments: &[&str]) -> String {
    let output = run("qemu-img", arguments);
    assert!(
        output.status.success(),
        "qemu-img {arguments:?}: {}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Runs qemu-io with commands on an image, which must succeed.
pub fn qemu_io(image: &Path, commands: &[&str]) {
    let mut arguments = vec!["-f", "qcow2"];
    for command in commands {
        arguments.extend(["-c", command]);
    }
    arguments.push(path_text(image));
    let output = run("qemu-io", &arguments);
    let printed = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success() && !printed.contains("rror"),
        "qemu-io {arguments:?}: {printed}"
    );
}

/// What `qemu-img check` says: corruptions and leaks.
pub fn qemu_check(image: &Path) -> (u64, u64) {
    let output = run("qemu-img", &["check", "-f", "qcow2", "--output=json", path_text(image)]);
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        matches!(output.status.code(), Some(0 | 2 | 3)),
        "qemu-img check: {printed}{errors}"
    );
    (number_in(&printed, "corruptions"), number_in(&printed, "leaks"))
}

/// The number behind `"key":` in JSON text; 0 where it is missing.
fn number_in(json: &str, key: &str) -> u64 {
    let Some((_, rest)) = json.split_once(&format!("\"{key}\":")) else {
        return 0;
    };
    let digits: String = rest.trim_start().chars().take_while(char::is_ascii_digit).collect();
    digits.parse().expect("digits")
}

pub fn path_text(path: &Path) -> &str {
    path.to_str().expect("temporary paths are UTF-8")
}

/// A small generator of bytes, so that a failure is replayed by its seed.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    pub fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    pub fn fill(&mut self, bytes: &mut [u8]) {
        for piece in bytes.chunks_mut(8) {
            piece.copy_from_slice(&self.next().to_le_bytes()[..piece.len()]);
        }
    }
}

/// A disk with noise, text and zeroes in pieces of all sizes.
pub fn sample_disk(size_bytes: u64, seed: u64) -> Vec<u8> {
    let mut random = Random(seed);
    let mut disk = vec![0; to_usize(size_bytes)];
    let mut at = 0;
    while at < disk.len() {
        let length = 512 << random.below(9);
        let end = (at + length).min(disk.len());
        match random.below(3) {
            0 => {}
            1 => random.fill(&mut disk[at..end]),
            _ => {
                let letter = u8::try_from(b'a' + u8::try_from(random.below(26)).unwrap()).unwrap();
                for (number, byte) in disk[at..end].iter_mut().enumerate() {
                    *byte = if number % 7 == 0 { letter } else { b'x' };
                }
            }
        }
        at = end;
    }
    disk
}

/// Asserts that `device` reads as `expected`, whole and in pieces, and that its extents tell the truth.
pub fn assert_reads_as(device: &dyn BlockDevice, expected: &[u8], what: &str) {
    assert_eq!(device.size_bytes(), expected.len() as u64, "{what}");
    let mut found = vec![0xee; expected.len()];
    device
        .read_at(&mut found, 0)
        .unwrap_or_else(|error| panic!("{what}: {error}"));
    if found != expected {
        let at = found.iter().zip(expected).position(|(left, right)| left != right);
        panic!("{what}: differs at {at:?}");
    }
    let mut random = Random(1);
    for _ in 0..50 {
        let start = random.below(expected.len() as u64);
        let length = random.below(100_000).min(expected.len() as u64 - start);
        let mut piece = vec![0xee; to_usize(length)];
        device.read_at(&mut piece, start).unwrap();
        assert!(
            piece == expected[to_usize(start)..to_usize(start + length)],
            "{what}: {length} bytes at {start}"
        );
    }
    let mut end = 0;
    for_each_extent(device, 0..device.size_bytes(), |extent| {
        assert_eq!(extent.offset, end);
        end = extent.end();
        if extent.kind != ExtentKind::Data {
            let bytes = &expected[to_usize(extent.offset)..to_usize(extent.end())];
            assert!(bytes.iter().all(|byte| *byte == 0), "{what}: {extent:?} is not zero");
        }
        Ok(())
    })
    .unwrap();
    assert_eq!(end, device.size_bytes());
}
