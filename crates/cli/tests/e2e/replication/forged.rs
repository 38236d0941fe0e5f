//! Forged streams of `btrfs send`, with valid checksums.

use std::path::Path;

const PATH: u16 = 15;
const PATH_TO: u16 = 16;
const PATH_LINK: u16 = 17;

/// A stream, built command by command.
pub(super) struct Forged(Vec<u8>);

/// CRC32C with an initial value of 0 and without final inversion.
fn checksum(bytes: &[u8]) -> u32 {
    bytes.iter().fold(0, |sum, byte| {
        (0..8).fold(sum ^ u32::from(*byte), |sum, _| {
            (sum >> 1) ^ if sum & 1 == 1 { 0x82F6_3B78 } else { 0 }
        })
    })
}

/// The bytes of a UUID in text form.
fn uuid(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text.bytes().filter(|byte| *byte != b'-').collect();
    let pair = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap();
    digits.chunks(2).map(pair).collect()
}

impl Forged {
    /// Begins the stream of a whole subvolume.
    pub(super) fn subvolume(name: &str, identity: &str) -> Self {
        let start = Self([&b"btrfs-stream\0"[..], &1_u32.to_le_bytes()].concat());
        start.command(
            1,
            &[(PATH, name.as_bytes()), (1, &uuid(identity)), (2, &7_u64.to_le_bytes())],
        )
    }

    /// Begins the stream of changes since a parent.
    pub(super) fn since(parent: &str, name: &str, identity: &str) -> Self {
        let start = Self([&b"btrfs-stream\0"[..], &1_u32.to_le_bytes()].concat());
        let number = 7_u64.to_le_bytes();
        let (one, other) = (uuid(identity), uuid(parent));
        let values: [(u16, &[u8]); 5] = [
            (PATH, name.as_bytes()),
            (1, &one),
            (2, &number),
            (20, &other),
            (21, &number),
        ];
        start.command(2, &values)
    }

    fn command(mut self, number: u16, values: &[(u16, &[u8])]) -> Self {
        let mut body = Vec::new();
        for (kind, value) in values {
            body.extend(kind.to_le_bytes());
            body.extend(u16::try_from(value.len()).unwrap().to_le_bytes());
            body.extend(*value);
        }
        let length = u32::try_from(body.len()).unwrap().to_le_bytes();
        let head = |sum: u32| [&length[..], &number.to_le_bytes(), &sum.to_le_bytes()].concat();
        let sum = checksum(&[head(0), body.clone()].concat());
        self.0.extend(head(sum));
        self.0.extend(body);
        self
    }

    pub(super) fn file(self, path: &str) -> Self {
        self.command(3, &[(PATH, path.as_bytes()), (3, &300_u64.to_le_bytes())])
    }

    /// A node for the block device `device`.
    pub(super) fn device(self, path: &str, device: &Path) -> Self {
        let number = std::os::unix::fs::MetadataExt::rdev(&device.metadata().unwrap());
        let (mode, inode) = (0o060_600_u64.to_le_bytes(), 301_u64.to_le_bytes());
        let number = number.to_le_bytes();
        self.command(5, &[(PATH, path.as_bytes()), (3, &inode), (8, &number), (5, &mode)])
    }

    pub(super) fn symlink(self, path: &str, target: &str) -> Self {
        let values: [(u16, &[u8]); 3] = [
            (PATH, path.as_bytes()),
            (3, &302_u64.to_le_bytes()),
            (PATH_LINK, target.as_bytes()),
        ];
        self.command(8, &values)
    }

    pub(super) fn rename(self, from: &str, to: &str) -> Self {
        self.command(9, &[(PATH, from.as_bytes()), (PATH_TO, to.as_bytes())])
    }

    pub(super) fn unlink(self, path: &str) -> Self {
        self.command(11, &[(PATH, path.as_bytes())])
    }

    pub(super) fn write(self, path: &str, data: &[u8]) -> Self {
        self.command(15, &[(PATH, path.as_bytes()), (18, &0_u64.to_le_bytes()), (19, data)])
    }

    pub(super) fn chmod(self, path: &str, mode: u64) -> Self {
        self.command(18, &[(PATH, path.as_bytes()), (5, &mode.to_le_bytes())])
    }

    pub(super) fn end(self) -> Vec<u8> {
        self.command(21, &[]).0
    }
}
