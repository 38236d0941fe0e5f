//! The digest of a disk: a hash of its content as a machine sees it, independent of repository and image format.
//!
//! It is a hash tree over fixed blocks, so that blocks can be hashed in any order and on several threads, and runs of
//! zeroes cost nothing: the hash of a subtree of zeroes is known. `docs/format/template.md` defines it byte by byte.

use std::fmt;
use std::str::FromStr;

use holdfast_block::{AlignedBuffer, BlockDevice, Extent, ExtentKind, for_each_extent, to_usize};

use crate::job::{Job, Result};

/// Bytes of a block. The last block of a disk is padded with zeroes.
pub(super) const BLOCK_BYTES: u64 = 64 << 10;
/// Levels of a tree over the largest possible disk, including the level of its blocks.
const LEVEL_COUNT: usize = 49;
/// Bytes per read: whole blocks.
const READ_BYTES: u64 = 2 << 20;
const _: () = assert!(BLOCK_BYTES == 64 << 10 && READ_BYTES.is_multiple_of(BLOCK_BYTES));

const BLOCK_CONTEXT: &str = "holdfast template 1 block";
const NODE_CONTEXT: &str = "holdfast template 1 node";
const DISK_CONTEXT: &str = "holdfast template 1 disk";

/// A hash of 32 bytes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Digest([u8; 32]);

impl Digest {
    pub(super) fn of(context: &str, parts: &[&[u8]]) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key(context);
        for part in parts {
            hasher.update(part);
        }
        Self(*hasher.finalize().as_bytes())
    }

    /// Its first digits, for display.
    pub fn short(&self) -> String {
        let mut text = self.to_string();
        text.truncate(12);
        text
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(formatter, "{byte:02x}"))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, formatter)
    }
}

impl FromStr for Digest {
    type Err = ();

    /// Parses 64 lower-case hexadecimal digits.
    fn from_str(text: &str) -> std::result::Result<Self, ()> {
        let is_digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
        if text.len() != 64 || !text.bytes().all(is_digit) {
            return Err(());
        }
        let mut bytes = [0; 32];
        for (byte, place) in bytes.iter_mut().zip((0..64).step_by(2)) {
            *byte = u8::from_str_radix(&text[place..place + 2], 16).map_err(|_| ())?;
        }
        Ok(Self(bytes))
    }
}

/// The hash of a block, whose trailing zeroes may be omitted.
pub(super) fn hash_block(bytes: &[u8]) -> Digest {
    static ZEROES: [u8; 64 << 10] = [0; 64 << 10];
    let missing = to_usize(BLOCK_BYTES).saturating_sub(bytes.len());
    Digest::of(BLOCK_CONTEXT, &[bytes, &ZEROES[..missing]])
}

fn hash_node(left: &Digest, right: &Digest) -> Digest {
    Digest::of(NODE_CONTEXT, &[&left.0, &right.0])
}

/// The number of blocks of a disk.
pub(super) fn block_count(size_bytes: u64) -> u64 {
    size_bytes.div_ceil(BLOCK_BYTES)
}

/// Computes the digest of a disk from the hashes of its blocks, in order.
///
/// Its memory does not grow with the disk.
pub(super) struct DiskDigester {
    /// Hashes of subtrees of zeroes by level; the first is that of a zero block.
    zeroes: Vec<Digest>,
    /// Left subtrees that wait for their right siblings, by level.
    waiting: [Option<Digest>; LEVEL_COUNT],
    count: u64,
}

impl DiskDigester {
    pub(super) fn new() -> Self {
        let mut zeroes = vec![hash_block(&[])];
        while zeroes.len() < LEVEL_COUNT {
            let below = zeroes[zeroes.len() - 1];
            zeroes.push(hash_node(&below, &below));
        }
        Self {
            zeroes,
            waiting: [None; LEVEL_COUNT],
            count: 0,
        }
    }

    /// Number of blocks so far.
    pub(super) fn count(&self) -> u64 {
        self.count
    }

    /// The hash of a block of zeroes.
    pub(super) fn zero(&self) -> Digest {
        self.zeroes[0]
    }

    /// Adds the next block.
    pub(super) fn push(&mut self, block: Digest) {
        self.push_subtree(0, block);
    }

    /// Adds `count` blocks of zeroes.
    pub(super) fn push_zeroes(&mut self, count: u64) {
        let mut left = count;
        while left > 0 {
            // The largest subtree of zeroes that starts here.
            let level = self.count.trailing_zeros().min(left.ilog2());
            let level_index = to_usize(level.into()).min(LEVEL_COUNT - 1);
            self.push_subtree(level_index, self.zeroes[level_index]);
            left -= 1 << level_index;
        }
    }

    fn push_subtree(&mut self, level: usize, hash: Digest) {
        let (mut level, mut hash) = (level, hash);
        self.count += 1 << level;
        while level + 1 < LEVEL_COUNT {
            let Some(left) = self.waiting[level].take() else { break };
            hash = hash_node(&left, &hash);
            level += 1;
        }
        self.waiting[level] = Some(hash);
    }

    /// The digest of a disk of `size_bytes`, after all its blocks were added.
    pub(super) fn finish(mut self, size_bytes: u64) -> Digest {
        assert_eq!(self.count, block_count(size_bytes), "a digest is over the whole disk");
        let whole = self.count.max(1).next_power_of_two();
        self.push_zeroes(whole - self.count);
        let top = self.waiting.iter().flatten().next_back().copied();
        let top = top.unwrap_or(self.zeroes[0]);
        Digest::of(DISK_CONTEXT, &[&size_bytes.to_le_bytes(), &top.0])
    }
}

impl Default for DiskDigester {
    fn default() -> Self {
        Self::new()
    }
}

/// The digest of bytes in memory.
pub(super) fn digest_bytes(bytes: &[u8]) -> Digest {
    let mut digester = DiskDigester::new();
    for block in bytes.chunks(to_usize(BLOCK_BYTES)) {
        digester.push(hash_block(block));
    }
    digester.finish(bytes.len() as u64)
}

/// Reads a whole device and returns its digest. Ranges that the device reports as zero are not read.
pub(super) fn digest_device(device: &dyn BlockDevice, job: Job<'_>) -> Result<Digest> {
    let size_bytes = device.size_bytes();
    let mut digester = DiskDigester::new();
    let mut buffer = AlignedBuffer::default();
    let mut data: Vec<Extent> = Vec::new();
    for_each_extent(device, 0..size_bytes, |extent| {
        if extent.kind == ExtentKind::Data {
            data.push(extent);
        }
        Ok(())
    })?;
    let mut reported = 0;
    for extent in data {
        let first = extent.offset / BLOCK_BYTES * BLOCK_BYTES;
        let mut at = first.max(digester.count() * BLOCK_BYTES);
        digester.push_zeroes(at / BLOCK_BYTES - digester.count());
        while at < extent.end() {
            job.interrupt.check()?;
            let end = extent
                .end()
                .next_multiple_of(BLOCK_BYTES)
                .min(at + READ_BYTES)
                .min(size_bytes);
            buffer.set_length(to_usize(end - at));
            device.read_at(&mut buffer, at)?;
            for block in buffer.chunks(to_usize(BLOCK_BYTES)) {
                digester.push(hash_block(block));
            }
            at = end;
            job.progress.advance(at - reported);
            reported = at;
        }
    }
    digester.push_zeroes(block_count(size_bytes) - digester.count());
    job.progress.advance(size_bytes - reported);
    Ok(digester.finish(size_bytes))
}

#[cfg(test)]
mod tests {
    use holdfast_block::{SeededRandom, to_usize};

    use super::{
        BLOCK_BYTES, BLOCK_CONTEXT, DISK_CONTEXT, Digest, DiskDigester, NODE_CONTEXT, block_count, digest_bytes,
        hash_block,
    };

    /// The definition in `docs/format/template.md`, implemented literally and without optimizations.
    fn defined(bytes: &[u8]) -> Digest {
        let block = to_usize(BLOCK_BYTES);
        let count = bytes.len().div_ceil(block).max(1).next_power_of_two();
        let mut padded = bytes.to_vec();
        padded.resize(count * block, 0);
        let derive = |context: &str, text: &[u8]| Digest(blake3::derive_key(context, text));
        let mut level: Vec<Digest> = padded.chunks(block).map(|block| derive(BLOCK_CONTEXT, block)).collect();
        while level.len() > 1 {
            let pairs = level.chunks(2);
            level = pairs
                .map(|pair| derive(NODE_CONTEXT, &[pair[0].0, pair[1].0].concat()))
                .collect();
        }
        let size_bytes = bytes.len() as u64;
        derive(DISK_CONTEXT, &[&size_bytes.to_le_bytes()[..], &level[0].0].concat())
    }

    #[test]
    fn a_digest_is_what_the_format_says() {
        let mut random = SeededRandom::new(7);
        let block = to_usize(BLOCK_BYTES);
        for length in [
            0,
            1,
            511,
            block - 1,
            block,
            block + 1,
            3 * block,
            4 * block,
            5 * block + 17,
            9 * block,
        ] {
            let mut bytes = vec![0; length];
            random.fill(&mut bytes);
            assert_eq!(digest_bytes(&bytes), defined(&bytes), "{length}");
            bytes.fill(0);
            assert_eq!(digest_bytes(&bytes), defined(&bytes), "{length} zeroes");
        }
    }

    #[test]
    fn zeroes_count_the_same_however_they_come() {
        let count = 37;
        let mut expected = None;
        for run in [1, 2, 3, 5, 8, 37] {
            let mut digester = DiskDigester::new();
            let mut left = count;
            while left > 0 {
                let now = run.min(left);
                if run == 1 {
                    digester.push(hash_block(&[0; 512]));
                } else {
                    digester.push_zeroes(now);
                }
                left -= now;
            }
            let found = digester.finish(count * BLOCK_BYTES);
            assert_eq!(*expected.get_or_insert(found), found, "{run}");
        }
    }

    /// The largest possible disk of zeroes is hashed quickly.
    #[test]
    fn a_huge_disk_of_zeroes_is_quick() {
        let size_bytes = i64::MAX.cast_unsigned();
        let mut digester = DiskDigester::new();
        digester.push_zeroes(block_count(size_bytes));
        let one = digester.finish(size_bytes);
        let mut digester = DiskDigester::new();
        digester.push(hash_block(&[1]));
        digester.push_zeroes(block_count(size_bytes) - 1);
        assert_ne!(digester.finish(size_bytes), one);
    }

    #[test]
    fn a_size_is_part_of_a_digest() {
        let digest = |length| digest_bytes(&vec![0; length]);
        assert_ne!(digest(512), digest(1024));
        assert_ne!(digest(0), digest(1));
    }

    /// Templates of the first version must stay valid.
    #[test]
    fn digests_never_change() {
        assert_eq!(
            digest_bytes(b"").to_string(),
            "0594ac58fb4b64c7a342b625d6118c3e2850ad52c59494f8addf6786aa739158"
        );
        assert_eq!(
            digest_bytes(&vec![7; 100_000]).to_string(),
            "09057ed399e844e71c628227599e17b01185281cbdb21f38a3bc887adb6de3f2"
        );
    }

    #[test]
    fn digests_are_read_as_they_are_written() {
        let digest = digest_bytes(b"x");
        assert_eq!(digest.to_string().parse(), Ok(digest));
        for wrong in [
            "",
            "abc",
            &digest.to_string().to_uppercase(),
            &"g".repeat(64),
            &"é".repeat(32),
        ] {
            assert_eq!(wrong.parse::<Digest>(), Err(()), "{wrong}");
        }
    }
}
