//! ACLs as text, which archives store, and in the kernel's binary form, which is an extended attribute.
//!
//! | offset | size | field of the binary form |
//! |---|---|---|
//! | 0 | 4 | version: 2 |
//! | 4 + 8 n | 2 | tag of entry n |
//! | 6 + 8 n | 2 | permissions |
//! | 8 + 8 n | 4 | id of the user or group |

/// The attribute with the access ACL.
pub(super) const ACCESS: &[u8] = b"system.posix_acl_access";
/// The attribute with the ACL that new files in a directory inherit.
pub(super) const DEFAULT: &[u8] = b"system.posix_acl_default";

const VERSION: u32 = 2;
const NO_ID: u32 = u32::MAX;
/// A real ACL has a few entries; ext4 stores at most about 500.
const ENTRY_COUNT_MAX: usize = 8192;

/// The tags of entries, with their names in text.
const TAGS: [(u16, &str); 6] = [
    (0x01, "user"),
    (0x02, "user"),
    (0x04, "group"),
    (0x08, "group"),
    (0x10, "mask"),
    (0x20, "other"),
];

/// An ACL that was read from text.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ParsedAcl {
    /// The kernel's form; none if the text has no entry.
    pub(super) binary: Option<Vec<u8>>,
    /// Entries whose user or group is given only by name.
    pub(super) unresolved_count: u64,
}

/// Converts the text of an ACL: `user::rwx,user:1000:r-x,...`, or with one entry per line. An entry of a named user may
/// have the number as a fourth field, as star and libarchive write it. Returns `None` if it is not the text of an ACL.
pub(super) fn from_text(text: &[u8]) -> Option<ParsedAcl> {
    let text = std::str::from_utf8(text).ok()?;
    let mut entries = Vec::new();
    let mut unresolved_count = 0;
    let lines = text.split(['\n', ',']).map(|line| line.split('#').next().unwrap_or(""));
    for line in lines.map(str::trim).filter(|line| !line.is_empty()) {
        if entries.len() >= ENTRY_COUNT_MAX {
            return None;
        }
        let fields: Vec<&str> = line.split(':').map(str::trim).collect();
        let (kind, qualifier, permissions, number) = match *fields.as_slice() {
            [kind, permissions] => (kind, "", permissions, ""),
            [kind, qualifier, permissions] => (kind, qualifier, permissions, ""),
            [kind, qualifier, permissions, number] => (kind, qualifier, permissions, number),
            _ => return None,
        };
        let tag = tag_of(kind, !qualifier.is_empty())?;
        // The mask and others have no id.
        let id = if qualifier.is_empty() || matches!(tag, 0x10 | 0x20) {
            NO_ID
        } else if let Ok(id) = qualifier.parse().or_else(|_| number.parse()) {
            id
        } else {
            unresolved_count += 1;
            continue;
        };
        entries.push((tag, id, permission_bits(permissions)?));
    }
    // The kernel refuses entries that are not in this order.
    entries.sort_unstable();
    let binary = (!entries.is_empty()).then(|| {
        let mut bytes = VERSION.to_le_bytes().to_vec();
        for (tag, id, permissions) in entries {
            bytes.extend_from_slice(&tag.to_le_bytes());
            bytes.extend_from_slice(&permissions.to_le_bytes());
            bytes.extend_from_slice(&id.to_le_bytes());
        }
        bytes
    });
    Some(ParsedAcl {
        binary,
        unresolved_count,
    })
}

fn tag_of(kind: &str, is_named: bool) -> Option<u16> {
    Some(match (kind, is_named) {
        ("user" | "u", false) => 0x01,
        ("user" | "u", true) => 0x02,
        ("group" | "g", false) => 0x04,
        ("group" | "g", true) => 0x08,
        ("mask" | "m", _) => 0x10,
        ("other" | "o", _) => 0x20,
        _ => return None,
    })
}

fn permission_bits(text: &str) -> Option<u16> {
    text.chars().try_fold(0, |bits, letter| {
        Some(
            bits | match letter {
                'r' => 4,
                'w' => 2,
                'x' => 1,
                '-' => 0,
                _ => return None,
            },
        )
    })
}

/// Converts the kernel's form to text with numbers instead of names; `None` if the text would not give the same bytes.
pub(super) fn to_text(binary: &[u8]) -> Option<String> {
    let (version, mut rest) = binary.split_first_chunk::<4>()?;
    if u32::from_le_bytes(*version) != VERSION {
        return None;
    }
    let mut entries = Vec::new();
    while !rest.is_empty() {
        let (tag, behind) = rest.split_first_chunk::<2>()?;
        let (permissions, behind) = behind.split_first_chunk::<2>()?;
        let (id, behind) = behind.split_first_chunk::<4>()?;
        rest = behind;
        let tag = u16::from_le_bytes(*tag);
        let (_, name) = TAGS.iter().find(|(known, _)| *known == tag)?;
        let id = match tag {
            0x02 | 0x08 => u32::from_le_bytes(*id).to_string(),
            _ => String::new(),
        };
        let bits = u16::from_le_bytes(*permissions);
        let letter = |bit: u16, letter| if bits & bit == 0 { '-' } else { letter };
        entries.push(format!(
            "{name}:{id}:{}{}{}",
            letter(4, 'r'),
            letter(2, 'w'),
            letter(1, 'x')
        ));
    }
    let text = entries.join(",");
    from_text(text.as_bytes())
        .is_some_and(|parsed| parsed.binary.as_deref() == Some(binary))
        .then_some(text)
}
