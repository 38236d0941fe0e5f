//! The records of a pax header: they replace or extend the fields of the header that follows.

use std::collections::BTreeMap;

use super::{ExtendedAttribute, TreeTime, acl};
use crate::tar::{corrupt, first_attribute};
use crate::{Error, Result};

/// The prefix of extended attributes.
pub(super) const XATTR: &[u8] = b"SCHILY.xattr.";
pub(super) const ACL_ACCESS: &[u8] = b"SCHILY.acl.access";
pub(super) const ACL_DEFAULT: &[u8] = b"SCHILY.acl.default";

/// The records of pax headers that matter.
#[derive(Debug, Clone, Default)]
pub(super) struct PaxRecords {
    pub(super) path: Option<Vec<u8>>,
    pub(super) link_path: Option<Vec<u8>>,
    pub(super) size_bytes: Option<u64>,
    pub(super) uid: Option<u32>,
    pub(super) gid: Option<u32>,
    pub(super) modified: Option<TreeTime>,
    xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    acl_access: Option<Vec<u8>>,
    acl_default: Option<Vec<u8>>,
    pub(super) sparse: SparseRecords,
}

/// GNU's records of files with holes, in the versions 0.0, 0.1 and 1.0.
#[derive(Debug, Clone, Default)]
pub(super) struct SparseRecords {
    pub(super) name: Option<Vec<u8>>,
    pub(super) real_size_bytes: Option<u64>,
    /// Offsets and lengths in turn, of the versions 0.0 and 0.1.
    pub(super) map: Option<Vec<u64>>,
    major: Option<u64>,
}

impl SparseRecords {
    /// Whether the map precedes the data.
    pub(super) fn has_map_in_data(&self) -> bool {
        self.major == Some(1)
    }
}

/// The extended attributes of a member.
pub(super) struct MemberAttributes {
    pub(super) attributes: Vec<ExtendedAttribute>,
    pub(super) unresolved_acl_count: u64,
}

impl PaxRecords {
    /// Applies the records in `bytes`; later ones win. An empty value removes an earlier one.
    pub(super) fn apply(&mut self, bytes: &[u8], offset: u64) -> Result<()> {
        let mut rest = bytes;
        // GNU tar pads with NUL after the last record.
        while rest.first().is_some_and(|byte| *byte != 0) {
            let (key, value, behind) = first_attribute(rest)
                .ok_or_else(|| corrupt("attributes of a member", offset, "one is not as long as it says"))?;
            rest = behind;
            self.set(key, value).ok_or_else(|| bad_value(key, value, offset))?;
        }
        Ok(())
    }

    fn set(&mut self, key: &[u8], value: &[u8]) -> Option<()> {
        let bytes = || Some(value.to_vec()).filter(|value| !value.is_empty());
        match key {
            b"path" => self.path = name(value)?,
            b"linkpath" => self.link_path = name(value)?,
            b"size" => self.size_bytes = optional(value)?.filter(|size| i64::try_from(*size).is_ok()),
            b"uid" => self.uid = optional(value)?,
            b"gid" => self.gid = optional(value)?,
            b"mtime" if value.is_empty() => self.modified = None,
            b"mtime" => self.modified = Some(time(value)?),
            ACL_ACCESS => self.acl_access = bytes(),
            ACL_DEFAULT => self.acl_default = bytes(),
            b"GNU.sparse.major" => self.sparse.major = optional(value)?,
            b"GNU.sparse.name" => self.sparse.name = name(value)?,
            b"GNU.sparse.size" | b"GNU.sparse.realsize" => {
                self.sparse.real_size_bytes = optional(value)?.filter(|size| i64::try_from(*size).is_ok());
            }
            b"GNU.sparse.map" => {
                let text = std::str::from_utf8(value).ok()?;
                let numbers = text.split(',').filter(|number| !number.is_empty());
                self.sparse.map = Some(numbers.map(str::parse).collect::<Result<_, _>>().ok()?);
            }
            b"GNU.sparse.offset" | b"GNU.sparse.numbytes" => {
                let number = optional(value)??;
                self.sparse.map.get_or_insert_default().push(number);
            }
            key => {
                if let Some(name) = key.strip_prefix(XATTR) {
                    self.xattrs.insert(decoded_name(name), value.to_vec());
                }
            }
        }
        Some(())
    }

    /// Bytes of memory that the records take, without those of fixed size.
    pub(super) fn kept_bytes(&self) -> usize {
        const ENTRY_BYTES: usize = 2 * size_of::<Vec<u8>>();
        let texts = [
            &self.path,
            &self.link_path,
            &self.acl_access,
            &self.acl_default,
            &self.sparse.name,
        ];
        let texts = texts.into_iter().flatten().map(Vec::len);
        let xattrs = self.xattrs.iter();
        let xattrs = xattrs.map(|(name, value)| name.len() + value.len() + ENTRY_BYTES);
        let map = self.sparse.map.as_ref().map_or(0, |map| map.len() * size_of::<u64>());
        texts.chain(xattrs).sum::<usize>() + map
    }

    /// The attributes of the member. The binary form of an ACL wins over its text.
    pub(super) fn take_attributes(&mut self, offset: u64) -> Result<MemberAttributes> {
        let mut attributes = std::mem::take(&mut self.xattrs);
        let mut unresolved_acl_count = 0;
        let texts = [
            (acl::ACCESS, ACL_ACCESS, self.acl_access.take()),
            (acl::DEFAULT, ACL_DEFAULT, self.acl_default.take()),
        ];
        for (name, key, text) in texts {
            let Some(text) = text.filter(|_| !attributes.contains_key(name)) else {
                continue;
            };
            let parsed = acl::from_text(&text).ok_or_else(|| bad_value(key, &text, offset))?;
            unresolved_acl_count += parsed.unresolved_count;
            if let Some(binary) = parsed.binary {
                attributes.insert(name.to_vec(), binary);
            }
        }
        let attributes = attributes.into_iter();
        Ok(MemberAttributes {
            attributes: attributes
                .map(|(name, value)| ExtendedAttribute { name, value })
                .collect(),
            unresolved_acl_count,
        })
    }
}

fn bad_value(key: &[u8], value: &[u8], offset: u64) -> Error {
    let detail = format!("{} is {}", super::header::shown(key), super::header::shown(value));
    corrupt("attributes of a member", offset, detail)
}

/// A name, which is not set if it is empty, and is not valid with a NUL in it.
#[expect(clippy::option_option, reason = "an invalid value, and none")]
fn name(value: &[u8]) -> Option<Option<Vec<u8>>> {
    if value.contains(&0) {
        return None;
    }
    Some(Some(value.to_vec()).filter(|value| !value.is_empty()))
}

/// A decimal number, which is not set if it is empty.
#[expect(clippy::option_option, reason = "an invalid value, and none")]
fn optional<N: std::str::FromStr>(value: &[u8]) -> Option<Option<N>> {
    if value.is_empty() {
        return Some(None);
    }
    Some(Some(std::str::from_utf8(value).ok()?.parse().ok()?))
}

/// Parses seconds with a fraction: `1700000000.123456789`, `-1.5`.
fn time(value: &[u8]) -> Option<TreeTime> {
    let text = std::str::from_utf8(value).ok()?;
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let unsigned = whole.strip_prefix('-');
    let is_digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    if whole.starts_with('+') || unsigned == Some("") || !is_digits(fraction) {
        return None;
    }
    let seconds: i64 = whole.parse().ok()?;
    let digits = fraction.bytes().chain(std::iter::repeat(b'0')).take(9);
    let nanoseconds = digits.fold(0_u32, |sum, digit| sum * 10 + u32::from(digit - b'0'));
    if unsigned.is_none() || nanoseconds == 0 {
        return Some(TreeTime { seconds, nanoseconds });
    }
    Some(TreeTime {
        seconds: seconds.checked_sub(1)?,
        nanoseconds: 1_000_000_000 - nanoseconds,
    })
}

/// Replaces `%3D` and `%25`, by which GNU tar stores `=` and `%` in names of attributes.
fn decoded_name(name: &[u8]) -> Vec<u8> {
    let mut decoded = Vec::with_capacity(name.len());
    let mut rest = name;
    while let Some((first, behind)) = rest.split_first() {
        let (byte, behind) = match rest {
            [b'%', b'3', b'D', behind @ ..] => (b'=', behind),
            [b'%', b'2', b'5', behind @ ..] => (b'%', behind),
            _ => (*first, behind),
        };
        decoded.push(byte);
        rest = behind;
    }
    decoded
}

/// The opposite of [`decoded_name`].
pub(super) fn encoded_name(name: &[u8]) -> Vec<u8> {
    let mut encoded = Vec::with_capacity(name.len());
    for byte in name {
        match byte {
            b'=' => encoded.extend_from_slice(b"%3D"),
            b'%' => encoded.extend_from_slice(b"%25"),
            byte => encoded.push(*byte),
        }
    }
    encoded
}
