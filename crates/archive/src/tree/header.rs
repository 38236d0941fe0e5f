//! The header of 512 bytes before every member.

use holdfast_block::Record;

use super::{DeviceNumber, TreeTime};
use crate::tar::{BLOCK_BYTES, checksum, corrupt, octal};
use crate::{Error, Result};

/// More than Linux has: 12 bits for the driver, 20 for the device.
const DEVICE_PART_MAX: u32 = 0o7_777_777;

/// The fields of a header. Numbers that a real archive may lack are 0 there.
pub(super) struct MemberHeader {
    pub(super) kind: u8,
    pub(super) path: Vec<u8>,
    pub(super) link_path: Vec<u8>,
    pub(super) mode: u32,
    pub(super) uid: u32,
    pub(super) gid: u32,
    pub(super) size_bytes: u64,
    pub(super) modified: TreeTime,
    pub(super) device: DeviceNumber,
}

impl MemberHeader {
    pub(super) fn parse(block: &[u8; BLOCK_BYTES], offset: u64) -> Result<Self> {
        let fields = Record::new(block);
        let wrong = |detail: String| corrupt("header of a member", offset, detail);
        let expected = octal(fields.field::<148, 8>()).ok_or_else(|| wrong("its checksum is no number".to_owned()))?;
        let actual = checksum(block);
        if u64::from(actual) != expected {
            return Err(wrong(format!("its checksum is {actual:o} and should be {expected:o}")));
        }
        let mut path = text(fields.field::<0, 100>());
        if fields.field::<257, 6>() == b"ustar\0" {
            // star stores times behind a shorter prefix.
            let prefix = match fields.field::<508, 4>() {
                b"tar\0" => text(fields.field::<345, 131>()),
                _ => text(fields.field::<345, 155>()),
            };
            if !prefix.is_empty() {
                path = [&prefix[..], b"/", &path].concat();
            }
        }
        let value = |field: &[u8], what: &str| {
            number(field).ok_or_else(|| wrong(format!("its {what} is no number (member {})", shown(&path))))
        };
        let size = value(fields.field::<124, 12>(), "size")?;
        let size_bytes =
            u64::try_from(size).map_err(|_| wrong(format!("its size is {size} (member {})", shown(&path))))?;
        let small = |field: &[u8], what: &str| {
            let value = value(field, what)?;
            u32::try_from(value).map_err(|_| wrong(format!("its {what} is {value} (member {})", shown(&path))))
        };
        let part = |field: &[u8]| {
            let part = small(field, "device number")?;
            let detail = || wrong(format!("its device number is {part} (member {})", shown(&path)));
            Some(part).filter(|part| *part <= DEVICE_PART_MAX).ok_or_else(detail)
        };
        let kind = fields.byte::<156>();
        // Other kinds of members have any bytes there.
        let device = match kind {
            b'3' | b'4' => DeviceNumber {
                major: part(fields.field::<329, 8>())?,
                minor: part(fields.field::<337, 8>())?,
            },
            _ => DeviceNumber { major: 0, minor: 0 },
        };
        Ok(Self {
            kind,
            link_path: text(fields.field::<157, 100>()),
            // Old programs store the type of the file above the permissions.
            mode: u32::try_from(value(fields.field::<100, 8>(), "mode")? & 0o7777).unwrap_or(0),
            uid: small(fields.field::<108, 8>(), "owner")?,
            gid: small(fields.field::<116, 8>(), "group")?,
            size_bytes,
            modified: TreeTime {
                seconds: value(fields.field::<136, 12>(), "time")?,
                nanoseconds: 0,
            },
            device,
            path,
        })
    }
}

/// The bytes of a field up to the first NUL.
fn text(field: &[u8]) -> Vec<u8> {
    field.split(|byte| *byte == 0).next().unwrap_or_default().to_vec()
}

/// A name for messages: lossy, quoted, and short.
pub(super) fn shown(name: &[u8]) -> String {
    const CHARACTERS_MAX: usize = 200;
    let text = String::from_utf8_lossy(name);
    let short: String = text.chars().take(CHARACTERS_MAX).collect();
    let more = if short.len() < text.len() { "..." } else { "" };
    format!("{short:?}{more}")
}

/// A number in octal digits or, with the first bit set, in base 256 with a sign.
pub(super) fn number(field: &[u8]) -> Option<i64> {
    match field.split_first() {
        Some((first, rest)) if first & 0x80 != 0 => {
            let sign = if first & 0x40 == 0 { 0 } else { -1_i128 };
            let start = (sign << 6) | i128::from(first & 0x3f);
            // At most 12 bytes: 95 bits.
            let value = rest.iter().fold(start, |value, byte| (value << 8) | i128::from(*byte));
            i64::try_from(value).ok()
        }
        _ => i64::try_from(octal(field)?).ok(),
    }
}

/// An error about a named member.
pub(super) fn wrong_member(path: &[u8], offset: u64, detail: &str) -> Error {
    corrupt("a member", offset, format!("{}: {detail}", shown(path)))
}
