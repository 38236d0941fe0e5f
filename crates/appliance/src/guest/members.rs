//! Members of Linux software RAID, and their arrays.
//!
//! Superblocks 0.90 and 1.x: Documentation/admin-guide/md.rst and include/uapi/linux/raid/md_p.h of Linux. Arrays are
//! assembled by sysfs, so that no program is needed.

#![deny(clippy::indexing_slicing)]

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use holdfast_block::BlockDevice;

use super::modules::try_load;

const MAGIC: u32 = 0xa92b_4efc;
const SUPERBLOCK_BYTES: usize = 4096;
/// Longest name in a superblock 1.x.
const NAME_BYTES: usize = 32;

/// What the superblock of a member says about its array.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Member {
    /// Identity of the array.
    identity: [u8; 16],
    /// `1.2`, as sysfs takes it.
    version: &'static str,
    /// Its name, or the number of an old array.
    name: String,
    level: i32,
    /// Counts the changes of the array: members of a lower count are older.
    event_count: u64,
}

/// A member and its device.
pub(super) struct MemberDevice {
    pub(super) member: Member,
    /// `8:1`, as sysfs names devices.
    pub(super) number: String,
}

fn field<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..at.checked_add(N)?)?.try_into().ok()
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    field(bytes, at).map(u32::from_le_bytes)
}

/// Reads the superblock of a member from one of its four places.
pub(super) fn read_member(device: &dyn BlockDevice) -> Option<Member> {
    let size_bytes = device.size_bytes();
    let newest = [
        ("1.1", 0),
        ("1.2", 4096),
        ("1.0", size_bytes.saturating_sub(8 << 10) & !0xfff),
    ];
    for (version, offset) in newest {
        let bytes = read_up_to(device, offset);
        if let Some(member) = parse_1(&bytes, version) {
            return Some(member);
        }
    }
    parse_0_90(&read_up_to(device, (size_bytes & !0xffff).saturating_sub(64 << 10)))
}

fn read_up_to(device: &dyn BlockDevice, offset: u64) -> Vec<u8> {
    let length = (SUPERBLOCK_BYTES as u64).min(device.size_bytes().saturating_sub(offset));
    let mut bytes = vec![0; usize::try_from(length).unwrap_or(0)];
    match device.read_at(&mut bytes, offset) {
        Ok(()) => bytes,
        Err(_) => Vec::new(),
    }
}

fn parse_1(bytes: &[u8], version: &'static str) -> Option<Member> {
    if word(bytes, 0)? != MAGIC || word(bytes, 4)? != 1 {
        return None;
    }
    let name = field::<NAME_BYTES>(bytes, 32)?;
    let name = name.split(|byte| *byte == 0).next().unwrap_or_default();
    let name = String::from_utf8_lossy(name).into_owned();
    Some(Member {
        identity: field(bytes, 16)?,
        version,
        // The name begins with the host that made the array.
        name: name.rsplit(':').next().unwrap_or_default().to_owned(),
        level: word(bytes, 72)?.cast_signed(),
        event_count: u64::from_le_bytes(field(bytes, 200)?),
    })
}

fn parse_0_90(bytes: &[u8]) -> Option<Member> {
    if word(bytes, 0)? != MAGIC || word(bytes, 4)? != 0 {
        return None;
    }
    let mut identity = [0; 16];
    for (part, at) in identity.chunks_mut(4).zip([20, 52, 56, 60]) {
        part.copy_from_slice(&field::<4>(bytes, at)?);
    }
    Some(Member {
        identity,
        version: "0.90",
        name: word(bytes, 44)?.to_string(),
        level: word(bytes, 28)?.cast_signed(),
        event_count: u64::from_le_bytes(field(bytes, 152)?),
    })
}

/// An array that was assembled.
pub(super) struct Array {
    /// Its name: `md/NAME`.
    pub(super) name: String,
    /// Its device below `/sys/class/block`.
    pub(super) device: String,
}

/// Assembles all arrays of `members`, read-only until the first write. Notes say which cannot be assembled.
pub(super) fn assemble(members: Vec<MemberDevice>, first: usize, notes: &mut Vec<String>) -> Vec<Array> {
    let mut groups: BTreeMap<[u8; 16], Vec<MemberDevice>> = BTreeMap::new();
    for member in members {
        groups.entry(member.member.identity).or_default().push(member);
    }
    let mut arrays: Vec<Array> = Vec::new();
    for (number, mut group) in groups.into_values().enumerate() {
        // The newest member describes the array.
        group.sort_by_key(|device| std::cmp::Reverse(device.member.event_count));
        let Some(newest) = group.first().map(|device| device.member.clone()) else {
            continue;
        };
        let mut name = format!("md/{}", newest.name);
        if newest.name.is_empty() || arrays.iter().any(|array| array.name == name) {
            name = format!("md/{}", number + first);
        }
        let device = format!("md_{}", number + first);
        match assemble_one(&device, &newest, &group) {
            Ok(()) => arrays.push(Array { name, device }),
            Err(error) => notes.push(format!(
                "{name}: the RAID cannot be started: {error}{}",
                super::mounted::last_kernel_line()
            )),
        }
    }
    arrays
}

/// Writes a file of the kernel, which is not created if it is missing.
fn set_attribute(path: &Path, value: &str) -> io::Result<()> {
    File::options().write(true).open(path)?.write_all(value.as_bytes())
}

fn assemble_one(device: &str, newest: &Member, group: &[MemberDevice]) -> io::Result<()> {
    try_load(&["md_mod"]);
    match newest.level {
        -1 => try_load(&["linear"]),
        0 => try_load(&["raid0"]),
        1 => try_load(&["raid1"]),
        4..=6 => try_load(&["raid456"]),
        10 => try_load(&["raid10"]),
        other => return Err(io::Error::other(format!("its level {other} is unknown"))),
    }
    let parameters = Path::new("/sys/module/md_mod/parameters");
    set_attribute(&parameters.join("new_array"), device)?;
    let folder = PathBuf::from("/sys/class/block").join(device).join("md");
    set_attribute(&folder.join("metadata_version"), newest.version)?;
    for member in group {
        // A member that is too old is refused by the kernel, and the array starts without it.
        if let Err(error) = set_attribute(&folder.join("new_dev"), &member.number) {
            super::report(&format!("md: {}: {error}", member.number));
        }
    }
    set_attribute(&folder.join("array_state"), "readonly")
}

#[cfg(test)]
mod tests {
    use holdfast_block::MemoryDevice;

    use super::{MAGIC, parse_0_90, parse_1, read_member};

    #[test]
    fn superblocks_are_found_at_their_places() {
        let mut bytes = vec![0; 1 << 20];
        bytes[4096..4100].copy_from_slice(&MAGIC.to_le_bytes());
        bytes[4100] = 1;
        bytes[4096 + 16..4096 + 32].fill(7);
        bytes[4096 + 32..4096 + 41].copy_from_slice(b"host:data");
        bytes[4096 + 72..4096 + 76].copy_from_slice(&5_u32.to_le_bytes());
        let member = read_member(&MemoryDevice::from_bytes(&bytes)).unwrap();
        assert_eq!((member.version, member.name.as_str(), member.level), ("1.2", "data", 5));
        assert_eq!(member.identity, [7; 16]);
        for length in [0, 10, 4097, 4200] {
            read_member(&MemoryDevice::from_bytes(&bytes[..length]));
            parse_1(&bytes[..length], "1.1");
            parse_0_90(&bytes[..length]);
        }
        assert_eq!(read_member(&MemoryDevice::from_bytes(&vec![0; 1 << 20])), None);
    }
}
