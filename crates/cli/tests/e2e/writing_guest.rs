//! The guest of `scripts/test-guest`: it writes numbered blocks to its disk, reads back the one before, and prints both on
//! its console.

use std::path::{Path, PathBuf};
use std::time::Duration;

use holdfast_block::{Clock as _, SystemClock};

/// How long the guest may take to boot in an emulated machine.
const PATIENCE: Duration = Duration::from_secs(120);
/// Bytes of a block.
const BLOCK_BYTES: usize = 4096;
/// The guest overwrites this many blocks at the start of its disk, one after another.
const BLOCK_COUNT: u64 = 1024;

/// A file of the guest: its kernel and its first file system.
pub(crate) fn guest_file(name: &str) -> String {
    let guest = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../build/guest");
    let path = guest.join(name);
    let path = path
        .canonicalize()
        .unwrap_or_else(|error| panic!("{}: {error} (scripts/setup makes it)", path.display()));
    path.to_str().unwrap().to_owned()
}

/// The console of a guest, in a file.
pub(crate) struct GuestConsole(pub(crate) PathBuf);

/// A block that the guest has printed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PrintedBlock {
    pub(crate) number: u64,
    /// Random for each boot.
    pub(crate) boot: String,
}

impl GuestConsole {
    pub(crate) fn lines(&self) -> Vec<String> {
        let text = std::fs::read(&self.0).unwrap_or_default();
        String::from_utf8_lossy(&text).lines().map(str::to_owned).collect()
    }

    pub(crate) fn last(&self) -> Option<PrintedBlock> {
        self.lines().iter().rev().find_map(|line| {
            let words: Vec<&str> = line.split_whitespace().collect();
            match words[..] {
                ["seq", number, "boot", boot] if boot.len() == 16 => Some(PrintedBlock {
                    number: number.parse().ok()?,
                    boot: boot.to_owned(),
                }),
                _ => None,
            }
        })
    }

    /// Waits until the guest has printed a block from `number` on.
    pub(crate) fn wait_for(&self, number: u64) -> PrintedBlock {
        let clock = SystemClock::new();
        loop {
            if let Some(last) = self.last().filter(|last| last.number >= number) {
                return last;
            }
            assert!(clock.now() < PATIENCE, "the console shows {:?}", self.lines().last());
            clock.sleep(Duration::from_millis(100));
        }
    }

    /// Waits until the guest has written `count` more blocks.
    pub(crate) fn wait_for_more(&self, count: u64) -> PrintedBlock {
        let number = self.last().map_or(0, |last| last.number);
        self.wait_for(number + count)
    }

    /// Asserts that the guest has read nothing that differs from its memory.
    pub(crate) fn assert_no_mismatch(&self) {
        let bad: Vec<String> = self.lines().into_iter().filter(|line| line.contains("BAD")).collect();
        assert!(bad.is_empty(), "{bad:?}");
    }
}

/// Asserts that a disk is as it was at one moment: it has all blocks up to some number, and none after it. Returns that
/// number.
pub(crate) fn assert_one_moment(disk: &[u8]) -> u64 {
    let word = |at: usize| u64::from_le_bytes(disk[at..at + 8].try_into().unwrap());
    let place = |number: u64| usize::try_from(number % BLOCK_COUNT).unwrap() * BLOCK_BYTES;
    // What the disk held before the guest wrote to it is no number that the guest could reach.
    let numbers = (0..BLOCK_COUNT).map(|number| word(place(number)));
    let last = numbers.filter(|number| *number < 1 << 40).max().unwrap_or_default();
    assert!(last > 0, "the guest has written nothing");
    for number in last.saturating_sub(BLOCK_COUNT - 1).max(1)..=last {
        let start = place(number);
        let mut found = (0..BLOCK_BYTES).step_by(16).map(|at| word(start + at));
        let other = found.find(|found| *found != number);
        assert_eq!(other, None, "of {last} blocks, number {number} has another content");
    }
    last
}
