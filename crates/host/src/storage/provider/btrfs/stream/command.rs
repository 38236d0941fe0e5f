//! Commands of a btrfs send stream, version 1: <https://btrfs.readthedocs.io/en/latest/dev/dev-send-stream.html>.
//!
//! ```text
//! stream    "btrfs-stream\0", version: u32, commands
//! command   body length: u32, command: u16, CRC32C of all of it with this field zero: u32, body
//! body      attributes: type: u16, length: u16, bytes
//! ```
//!
//! Numbers are little-endian. The checksum begins with 0 and is not inverted.

use super::super::super::incoming::StreamRefusal;

/// Magic bytes of a stream.
pub(super) const MAGIC: &[u8; 13] = b"btrfs-stream\0";
/// The supported version.
pub(super) const VERSION: u32 = 1;
/// Length of the header of a command.
pub(super) const HEAD_LENGTH: usize = 10;
/// Limit on the bytes of a body: senders of version 1 have a buffer of 64 KiB for a whole command.
pub(super) const BODY_BYTES_MAX: usize = 64 << 10;

const ATTRIBUTE_HEAD: usize = 4;

pub(super) type Result<T> = std::result::Result<T, StreamRefusal>;

/// The type of a command; the numbers are those of the stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u16)]
pub(crate) enum Verb {
    Subvolume = 1,
    Snapshot,
    MakeFile,
    MakeFolder,
    MakeNode,
    MakeFifo,
    MakeSocket,
    Symlink,
    Rename,
    Link,
    Unlink,
    RemoveFolder,
    SetXattr,
    RemoveXattr,
    Write,
    Clone,
    Truncate,
    Chmod,
    Chown,
    Utimes,
    End,
    UpdateExtent,
}

/// The type of an attribute; the numbers are those of the stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u16)]
pub(crate) enum Key {
    Uuid = 1,
    Transaction,
    Inode,
    Size,
    Mode,
    Uid,
    Gid,
    Device,
    ChangeTime,
    ModifyTime,
    AccessTime,
    XattrName = 13,
    XattrData,
    Path,
    PathTo,
    PathLink,
    FileOffset,
    Data,
    CloneUuid,
    CloneTransaction,
    ClonePath,
    CloneOffset,
    CloneLength,
}

impl Key {
    /// The fixed length of the value; none if it varies.
    fn length(self) -> Option<usize> {
        match self {
            Self::Uuid | Self::CloneUuid => Some(16),
            Self::ChangeTime | Self::ModifyTime | Self::AccessTime => Some(12),
            Self::XattrName
            | Self::XattrData
            | Self::Path
            | Self::PathTo
            | Self::PathLink
            | Self::Data
            | Self::ClonePath => None,
            _ => Some(8),
        }
    }
}

/// Every command with its attributes, all of which are required.
const VERBS: [(Verb, &[Key]); 22] = [
    (Verb::Subvolume, &[Key::Path, Key::Uuid, Key::Transaction]),
    (
        Verb::Snapshot,
        &[
            Key::Path,
            Key::Uuid,
            Key::Transaction,
            Key::CloneUuid,
            Key::CloneTransaction,
        ],
    ),
    (Verb::MakeFile, &[Key::Path, Key::Inode]),
    (Verb::MakeFolder, &[Key::Path, Key::Inode]),
    (Verb::MakeNode, &[Key::Path, Key::Inode, Key::Device, Key::Mode]),
    (Verb::MakeFifo, &[Key::Path, Key::Inode, Key::Device, Key::Mode]),
    (Verb::MakeSocket, &[Key::Path, Key::Inode, Key::Device, Key::Mode]),
    (Verb::Symlink, &[Key::Path, Key::Inode, Key::PathLink]),
    (Verb::Rename, &[Key::Path, Key::PathTo]),
    (Verb::Link, &[Key::Path, Key::PathLink]),
    (Verb::Unlink, &[Key::Path]),
    (Verb::RemoveFolder, &[Key::Path]),
    (Verb::SetXattr, &[Key::Path, Key::XattrName, Key::XattrData]),
    (Verb::RemoveXattr, &[Key::Path, Key::XattrName]),
    (Verb::Write, &[Key::Path, Key::FileOffset, Key::Data]),
    (
        Verb::Clone,
        &[
            Key::FileOffset,
            Key::CloneLength,
            Key::Path,
            Key::CloneUuid,
            Key::CloneTransaction,
            Key::ClonePath,
            Key::CloneOffset,
        ],
    ),
    (Verb::Truncate, &[Key::Path, Key::Size]),
    (Verb::Chmod, &[Key::Path, Key::Mode]),
    (Verb::Chown, &[Key::Path, Key::Uid, Key::Gid]),
    (
        Verb::Utimes,
        &[Key::Path, Key::AccessTime, Key::ModifyTime, Key::ChangeTime],
    ),
    (Verb::End, &[]),
    (Verb::UpdateExtent, &[Key::Path, Key::FileOffset, Key::Size]),
];

/// A command, with each of its attributes once, in the order of [`VERBS`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Command {
    pub(crate) verb: Verb,
    values: Vec<(Key, Vec<u8>)>,
}

/// The header of a command.
pub(super) struct CommandHead {
    pub(super) body_length: usize,
    verb: u16,
    checksum: u32,
}

fn refused<T>(reason: String) -> Result<T> {
    Err(StreamRefusal::new(reason))
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

/// CRC32C that begins with 0 and is not inverted, as the kernel's `crc32c_le(0, ...)`.
fn checksum(parts: [&[u8]; 2]) -> u32 {
    let sum = parts
        .iter()
        .fold(u32::MAX, |sum, part| crc32c::crc32c_append(sum, part));
    !sum
}

impl CommandHead {
    pub(super) fn parse(bytes: &[u8; HEAD_LENGTH]) -> Result<Self> {
        let length = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        let body_length = usize::try_from(length).ok().filter(|length| *length <= BODY_BYTES_MAX);
        let Some(body_length) = body_length else {
            return refused(format!("a command of {length} bytes"));
        };
        Ok(Self {
            body_length,
            verb: u16_at(bytes, 4),
            checksum: u32::from_le_bytes([bytes[6], bytes[7], bytes[8], bytes[9]]),
        })
    }
}

impl Command {
    /// Parses a command from any header and body.
    pub(super) fn parse(head: &CommandHead, body: &[u8]) -> Result<Self> {
        let found = checksum([&head_bytes(body.len(), head.verb, 0), body]);
        if found != head.checksum {
            return refused(format!("the checksum of a command is wrong (kind {})", head.verb));
        }
        Self::decode(head.verb, body)
    }

    fn decode(number: u16, body: &[u8]) -> Result<Self> {
        let Some((verb, keys)) = VERBS.iter().find(|(verb, _)| *verb as u16 == number) else {
            return refused(format!("a command of the unknown kind {number}"));
        };
        let mut values: Vec<Option<Vec<u8>>> = vec![None; keys.len()];
        let mut rest = body;
        while !rest.is_empty() {
            let Some((head, after)) = rest.split_at_checked(ATTRIBUTE_HEAD) else {
                return refused(format!("{verb:?} ends in the middle of an attribute"));
            };
            let (number, length) = (u16_at(head, 0), usize::from(u16_at(head, 2)));
            let Some((value, after)) = after.split_at_checked(length) else {
                return refused(format!("{verb:?} ends in the middle of an attribute"));
            };
            rest = after;
            let at = keys.iter().position(|key| *key as u16 == number);
            let Some(at) = at else {
                return refused(format!("{verb:?} with an attribute of kind {number}"));
            };
            if keys[at].length().is_some_and(|expected| expected != length) {
                return refused(format!("{verb:?} with {length} bytes of {:?}", keys[at]));
            }
            if values[at].replace(value.to_vec()).is_some() {
                return refused(format!("{verb:?} with {:?} twice", keys[at]));
            }
        }
        let complete = keys.iter().zip(values).map(|(key, value)| {
            let value = value.ok_or_else(|| StreamRefusal::new(format!("{verb:?} without {key:?}")))?;
            Ok((*key, value))
        });
        Ok(Self {
            verb: *verb,
            values: complete.collect::<Result<_>>()?,
        })
    }

    /// The value of an attribute that every command of this type has.
    pub(crate) fn value(&self, key: Key) -> &[u8] {
        let found = self.values.iter().find(|(known, _)| *known == key);
        found.map_or(&[], |(_, value)| value)
    }

    pub(super) fn number(&self, key: Key) -> u64 {
        <[u8; 8]>::try_from(self.value(key)).map_or(0, u64::from_le_bytes)
    }

    pub(super) fn uuid(&self, key: Key) -> [u8; 16] {
        self.value(key).try_into().unwrap_or_default()
    }

    pub(super) fn set(&mut self, key: Key, value: &[u8]) {
        for (known, old) in &mut self.values {
            if *known == key {
                value.clone_into(old);
            }
        }
    }

    /// Appends the encoded command.
    pub(crate) fn encode(&self, to: &mut Vec<u8>) {
        let mut body = Vec::new();
        for (key, value) in &self.values {
            let length = u16::try_from(value.len()).expect("it came with a length of 16 bits, or is short");
            body.extend((*key as u16).to_le_bytes());
            body.extend(length.to_le_bytes());
            body.extend(value);
        }
        put(self.verb as u16, &body, to);
    }
}

/// Appends a command with this body.
pub(super) fn put(verb: u16, body: &[u8], to: &mut Vec<u8>) {
    let sum = checksum([&head_bytes(body.len(), verb, 0), body]);
    to.extend(head_bytes(body.len(), verb, sum));
    to.extend(body);
}

fn head_bytes(body_length: usize, verb: u16, checksum: u32) -> [u8; HEAD_LENGTH] {
    let length = u32::try_from(body_length)
        .expect("a body has 64 KiB at most")
        .to_le_bytes();
    let (verb, sum) = (verb.to_le_bytes(), checksum.to_le_bytes());
    [
        length[0], length[1], length[2], length[3], verb[0], verb[1], sum[0], sum[1], sum[2], sum[3],
    ]
}

/// A command with any number and attributes, for tests and fuzzers.
#[cfg(any(test, feature = "hostile"))]
pub(super) fn raw(verb: u16, attributes: &[(u16, &[u8])]) -> Vec<u8> {
    let mut body = Vec::new();
    for (key, value) in attributes {
        body.extend(key.to_le_bytes());
        body.extend(u16::try_from(value.len()).expect("a short value").to_le_bytes());
        body.extend(*value);
    }
    let mut command = Vec::new();
    put(verb, &body, &mut command);
    command
}
