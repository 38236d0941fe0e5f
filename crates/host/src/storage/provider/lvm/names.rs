//! Names of host snapshots as logical volumes, and their metadata in tags.
//!
//! A snapshot NAME of VG/LV is the volume `VG/LV+NAME`, with `+` for each `:` of NAME, which must not contain `+`. If
//! that is too long for LVM, or contains a reserved word, it is `VG/holdfast+` and 16 hex digits. The name has no
//! meaning: the tags are authoritative.
//!
//! | tag | meaning |
//! |---|---|
//! | `holdfast.snapshot=NAME` | the volume is a host snapshot of Holdfast, of this name |
//! | `holdfast.of=UUID:LV` | the origin is the volume with this UUID, which had this name |
//! | `holdfast.record.N=TEXT` | the record, in parts of at most 900 bytes, from 0 on; see [`encode`] |
//! | `holdfast.hold=TAG` | the snapshot has this hold |
//! | `holdfast.held` | the snapshot has at least one hold |
//! | `holdfast.metadata` | on a pool: Holdfast has reserved its metadata snapshot |
//!
//! Source: lvm(8), "Valid names" and "Tags"; lvm2 2.03.16.

pub(super) const HELD: &str = "holdfast.held";
/// The tag of a pool whose metadata snapshot Holdfast has reserved.
pub(super) const METADATA: &str = "holdfast.metadata";
const SNAPSHOT: &str = "holdfast.snapshot=";
const OF: &str = "holdfast.of=";
const RECORD: &str = "holdfast.record.";
const HOLD: &str = "holdfast.hold=";
/// Limit on the bytes of a part in a tag: LVM permits 1024 per tag.
const PART_BYTES_MAX: usize = 900;
/// Limit on the parts of a record: each of its 1000 bytes may be encoded as three.
const PART_COUNT_MAX: usize = 4;
/// Limit on the bytes of a device name, in which hyphens are doubled, without LVM's suffixes.
const DEVICE_NAME_BYTES_MAX: usize = 115;
/// Words and prefixes of names that LVM reserves.
const RESERVED_WORDS: [&str; 14] = [
    "_cdata", "_cmeta", "_corig", "_cpool", "_cvol", "_mimage", "_mlog", "_pmspare", "_rimage", "_rmeta", "_tdata",
    "_tmeta", "_vdata", "_vorigin",
];
const RESERVED_PREFIXES: [&str; 2] = ["pvmove", "snapshot"];

/// The tags of a volume.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Tags {
    /// The name of the host snapshot; none if Holdfast did not create it.
    pub(super) snapshot: Option<String>,
    /// The UUID and the name of the origin.
    pub(super) of: Option<(String, String)>,
    pub(super) holds: Vec<String>,
    pub(super) has_metadata: bool,
    /// The tags with the record, still encoded.
    pub(super) records: Vec<String>,
}

impl Tags {
    /// Parses the tags of a volume, separated by commas.
    pub(super) fn parse(text: &str) -> Self {
        let mut tags = Self::default();
        for tag in text.split(',') {
            if let Some(name) = tag.strip_prefix(SNAPSHOT) {
                tags.snapshot = Some(name.to_owned());
            } else if let Some(of) = tag.strip_prefix(OF) {
                tags.of = of
                    .split_once(':')
                    .map(|(uuid, name)| (uuid.to_owned(), name.to_owned()));
            } else if let Some(tag) = tag.strip_prefix(HOLD) {
                tags.holds.push(tag.to_owned());
            } else if tag == METADATA {
                tags.has_metadata = true;
            } else if tag.starts_with(RECORD) {
                tags.records.push(tag.to_owned());
            }
        }
        tags
    }

    /// The record; none if a part is missing or invalid.
    pub(super) fn record(&self) -> Option<String> {
        let mut parts: Vec<(usize, &str)> = Vec::new();
        for tag in &self.records {
            let (number, text) = tag.strip_prefix(RECORD)?.split_once('=')?;
            parts.push((number.parse().ok()?, text));
        }
        parts.sort_unstable();
        let is_whole = !parts.is_empty() && parts.iter().enumerate().all(|(index, (number, _))| index == *number);
        let text: String = parts.iter().map(|(_, text)| *text).collect();
        if is_whole { decode(&text) } else { None }
    }
}

/// The tags of a new host snapshot, without its record.
pub(super) fn tags_of(snapshot: &str, origin_uuid: &str, origin: &str) -> [String; 2] {
    [format!("{SNAPSHOT}{snapshot}"), format!("{OF}{origin_uuid}:{origin}")]
}

pub(super) fn hold_tag(tag: &str) -> String {
    format!("{HOLD}{tag}")
}

/// The tags with a record; none if it is too long.
pub(super) fn record_tags(record: &str) -> Option<Vec<String>> {
    let text = encode(record);
    // The encoded text is ASCII, and can be split anywhere.
    let parts = text.as_bytes().chunks(PART_BYTES_MAX);
    if parts.len() > PART_COUNT_MAX {
        return None;
    }
    let tag = |(number, part): (usize, &[u8])| format!("{RECORD}{number}={}", String::from_utf8_lossy(part));
    Some(parts.enumerate().map(tag).collect())
}

/// Encodes a text with the characters that a tag may have: `!` is a quotation mark, `&` a comma, `#` a space, and `=`
/// with two hex digits any other byte. So most records are readable in the output of `lvs`, and hardly longer than
/// the text.
fn encode(text: &str) -> String {
    use std::fmt::Write as _;
    let mut encoded = String::with_capacity(text.len() + 16);
    for byte in text.bytes() {
        match byte {
            b'"' => encoded.push('!'),
            b',' => encoded.push('&'),
            b' ' => encoded.push('#'),
            _ if byte.is_ascii_alphanumeric() || b"_+.-/:".contains(&byte) => encoded.push(char::from(byte)),
            _ => write!(encoded, "={byte:02X}").expect("a text takes all"),
        }
    }
    encoded
}

fn decode(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        rest = after;
        bytes.push(match first {
            b'!' => b'"',
            b'&' => b',',
            b'#' => b' ',
            b'=' => {
                let digits = std::str::from_utf8(rest.get(..2)?).ok()?;
                rest = rest.get(2..)?;
                u8::from_str_radix(digits, 16).ok()?
            }
            other => *other,
        });
    }
    String::from_utf8(bytes).ok()
}

/// The name of the volume of a host snapshot.
pub(super) fn volume_name(group: &str, origin: &str, snapshot: &str) -> String {
    let spelled = format!("{origin}+{}", snapshot.replace(':', "+"));
    let hyphens = |text: &str| text.len() + text.matches('-').count();
    let is_kept = RESERVED_WORDS.iter().any(|word| spelled.contains(word))
        || RESERVED_PREFIXES.iter().any(|beginning| spelled.starts_with(beginning));
    if !is_kept && hyphens(group) + 1 + hyphens(&spelled) <= DEVICE_NAME_BYTES_MAX {
        return spelled;
    }
    // FNV-1a: the digest only has to make names distinct.
    let digest = format!("{origin}@{snapshot}")
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325_u64, |digest, byte| {
            (digest ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
    format!("holdfast+{digest:016x}")
}

/// Whether a text is a valid name of a volume or volume group.
pub(super) fn is_name(name: &str) -> bool {
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"+_.-".contains(&byte);
    !name.is_empty()
        && name.len() < 128
        && !name.starts_with('-')
        && name != "."
        && name != ".."
        && name.bytes().all(is_allowed)
}

/// Splits `vg0/web1` into group and volume.
pub(super) fn parts(name: &str) -> Option<(&str, &str)> {
    let (group, volume) = name.split_once('/')?;
    (is_name(group) && is_name(volume)).then_some((group, volume))
}

#[cfg(test)]
mod tests {
    use super::{Tags, encode, is_name, parts, record_tags, tags_of, volume_name};

    #[test]
    fn a_record_is_decoded_from_tags_in_any_order() {
        let records = [
            "{\"schema\":1,\"machines\":[\"web 1\"],\"time\":\"2026-11-22T16:45:10.5Z\"}".to_owned(),
            "ä!&#=,\"\n\t\\".to_owned(),
            "{".repeat(1000),
        ];
        for record in records {
            let mut tags = record_tags(&record).unwrap();
            assert!(tags.iter().all(|tag| tag.len() <= 1024));
            let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"_+.-/=!:&#".contains(&byte);
            assert!(tags.iter().all(|tag| tag.bytes().all(is_allowed)), "{tags:?}");
            tags.reverse();
            assert_eq!(Tags::parse(&tags.join(",")).record(), Some(record));
        }
        assert_eq!(encode("{\"a\":\"b c\"}"), "=7B!a!:!b#c!=7D");
        assert_eq!(record_tags(&"x".repeat(4000)), None);
    }

    #[test]
    fn an_incomplete_record_is_none() {
        for tags in [
            "",
            "holdfast.record.1=a",
            "holdfast.record.0=a,holdfast.record.2=b",
            "holdfast.record.0==7",
            "holdfast.record.0==ZZ",
            "holdfast.record.x=1",
            "holdfast.record.0=a,holdfast.record.0=b",
            "holdfast.record.0==FF",
        ] {
            assert_eq!(Tags::parse(tags).record(), None, "{tags}");
        }
    }

    #[test]
    fn tags_of_volumes_are_parsed() {
        let [name, of] = tags_of("a:b", "AbCd-1", "web1");
        let tags = Tags::parse(&format!("mine,{name},{of},holdfast.held,holdfast.hold=x:y"));
        assert_eq!(tags.snapshot.as_deref(), Some("a:b"));
        assert_eq!(tags.of, Some(("AbCd-1".to_owned(), "web1".to_owned())));
        assert_eq!(tags.holds, ["x:y"]);
        assert_eq!(Tags::parse(""), Tags::default());
    }

    #[test]
    fn volumes_are_named_after_their_origin_if_lvm_permits() {
        assert_eq!(
            volume_name("vg0", "web1", "holdfast_2026-11-22_16:45:10Z"),
            "web1+holdfast_2026-11-22_16+45+10Z"
        );
        let long = volume_name("vg0", &"a".repeat(60), &"b".repeat(60));
        assert!(long.starts_with("holdfast+") && long.len() == 25, "{long}");
        assert_ne!(long, volume_name("vg0", &"a".repeat(60), &"c".repeat(60)));
        // Each hyphen is doubled in the name of a device.
        assert!(volume_name(&"-".repeat(40), "a", &"-".repeat(20)).starts_with("holdfast+"));
        assert!(volume_name("vg0", "web1", "x_tmeta").starts_with("holdfast+"));
        assert!(volume_name("vg0", "web1", "snapshot").starts_with("web1+"));
    }

    #[test]
    fn only_valid_names_become_arguments() {
        assert_eq!(parts("vg0/web1+a_b.c-d"), Some(("vg0", "web1+a_b.c-d")));
        for other in [
            "vg0", "vg0/", "/web1", "-f/web1", "vg0/-f", "vg0/a/b", "vg0/a b", "vg0/a@b", "../x", "vg0/..", "vg0/a:b",
        ] {
            assert_eq!(parts(other), None, "{other}");
        }
        assert!(!is_name(&"a".repeat(128)) && is_name(&"a".repeat(127)));
    }
}
