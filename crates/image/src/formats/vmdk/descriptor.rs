//! Parses and writes the descriptor, a text that lists the extents of a disk.
//!
//! ```text
//! # Disk DescriptorFile
//! version=1
//! CID=7c0bd2a4
//! parentCID=ffffffff
//! createType="monolithicSparse"
//! parentFileNameHint="base.vmdk"
//!
//! # Extent description
//! RW 131072 SPARSE "web1.vmdk"
//! ```

use std::ops::Range;

use crate::error::corrupt;
use crate::model::identity::ImageId;
use crate::model::windows_path::from_windows;
use crate::{Error, Result};

/// Maximum length of a descriptor.
pub(crate) const TEXT_BYTES_MAX: u64 = 1 << 20;
const EXTENT_COUNT_MAX: usize = 4096;
/// The parent CID of an image without a parent.
pub(crate) const NO_PARENT: u32 = 0xffff_ffff;

/// The parsed descriptor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Descriptor {
    /// The CID. It changes when the disk is written to.
    pub(crate) content_id: u32,
    /// The range of its digits in the text: up to eight, because QEMU omits leading zeroes.
    pub(crate) content_id_at: Range<usize>,
    /// CID and path of the parent; the CID is [`NO_PARENT`] if the parent is identified by
    /// [`parent_id`](Self::parent_id) only, as in VirtualBox.
    pub(crate) parent: Option<(u32, String)>,
    pub(crate) extents: Vec<NamedExtent>,
    pub(crate) id: Option<ImageId>,
    /// The UUID of the parent, if recorded.
    pub(crate) parent_id: Option<ImageId>,
}

/// What a new image stores about its parent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct VmdkParent {
    pub(crate) content_id: u32,
    pub(crate) id: Option<ImageId>,
    /// Its path, as stored in the image.
    pub(crate) name: String,
}

/// An extent, as the descriptor lists it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NamedExtent {
    pub(crate) sectors: u64,
    pub(crate) kind: NamedExtentKind,
}

/// How an extent is stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum NamedExtentKind {
    /// Reads as zero.
    Zero,
    /// Stored in a file without metadata, from this sector on.
    Flat { file: String, offset: u64 },
    /// Stored in a sparse extent file, which has tables.
    Sparse { file: String },
}

impl Descriptor {
    pub(crate) fn parse(text: &[u8], image: &str) -> Result<Self> {
        let end = text.iter().position(|byte| *byte == 0).unwrap_or(text.len());
        let mut found = Self {
            content_id: 0,
            content_id_at: 0..0,
            parent: None,
            extents: Vec::new(),
            id: None,
            parent_id: None,
        };
        let (mut parent_id, mut hint) = (NO_PARENT, String::new());
        let mut at = 0;
        // Parse bytes, not characters: the text may have any code page, and ranges of it are replaced.
        for line in text.get(..end).unwrap_or(text).split_inclusive(|byte| *byte == b'\n') {
            let start = at;
            at += line.len();
            let decoded = String::from_utf8_lossy(line);
            let trimmed = decoded.trim();
            let wrong = |detail: String| corrupt(image, "descriptor", start as u64, detail);
            if let Some(extent) = NamedExtent::parse(trimmed, image, start)? {
                if found.extents.len() == EXTENT_COUNT_MAX {
                    return Err(wrong(format!("more than {EXTENT_COUNT_MAX} extents")));
                }
                found.extents.push(extent);
                continue;
            }
            let Some((key, value)) = trimmed.split_once('=') else {
                continue;
            };
            let value = value.trim().trim_matches('"');
            let number = || {
                let digits = Some(value).filter(|value| value.bytes().all(|byte| byte.is_ascii_hexdigit()));
                let number = digits.and_then(|digits| u32::from_str_radix(digits, 16).ok());
                number.ok_or_else(|| wrong(format!("{value:?} is no number of eight digits")))
            };
            match key.trim().to_ascii_lowercase().as_str() {
                "cid" => {
                    found.content_id = number()?;
                    let value_start = line.iter().position(|byte| *byte == b'=').map_or(0, |at| at + 1);
                    let mut value_bytes = line.iter().skip(value_start);
                    let digits = value_bytes.position(u8::is_ascii_hexdigit).unwrap_or_default();
                    let digits_at = start + value_start + digits;
                    found.content_id_at = digits_at..digits_at + value.len();
                }
                "parentcid" => parent_id = number()?,
                "parentfilenamehint" => hint = from_windows(value),
                IMAGE | IMAGE_OF_VMWARE => found.id = parse_id(value),
                PARENT => found.parent_id = parse_id(value).filter(|id| !id.is_nil()),
                _ => {}
            }
        }
        if found.content_id_at.is_empty() || found.content_id_at.len() > 8 {
            return Err(corrupt(image, "descriptor", 0, "it has no CID"));
        }
        // VirtualBox identifies a parent by its UUID only.
        if parent_id != NO_PARENT || found.parent_id.is_some() {
            found.parent = Some((parent_id, hint));
        }
        Ok(found)
    }

    /// The text of a new image with one extent in the file `name`.
    pub(super) fn text(name: &str, sectors: u64, id: ImageId, content_id: u32, parent: Option<&VmdkParent>) -> String {
        let parent_id = parent.map_or(NO_PARENT, |parent| parent.content_id);
        let hint = parent.map_or(String::new(), |parent| {
            format!("parentFileNameHint=\"{}\"\n", parent.name)
        });
        let parent_uuid = parent.and_then(|parent| parent.id).unwrap_or(ImageId::NIL);
        let nil = ImageId::NIL;
        let cylinders = (sectors / (16 * 63)).clamp(1, 16_383);
        format!(
            "# Disk DescriptorFile\nversion=1\nCID={content_id:08x}\nparentCID={parent_id:08x}\ncreateType=\"monolithicSparse\"\n{hint}\
             \n# Extent description\nRW {sectors} SPARSE \"{name}\"\n\n# The Disk Data Base\n#DDB\n\nddb.virtualHWVersion = \"4\"\n\
             ddb.geometry.cylinders = \"{cylinders}\"\nddb.geometry.heads = \"16\"\nddb.geometry.sectors = \"63\"\n\
             ddb.adapterType = \"ide\"\n{IMAGE}=\"{id}\"\nddb.uuid.modification=\"{nil}\"\n{PARENT}=\"{parent_uuid}\"\n\
             ddb.uuid.parentmodification=\"{nil}\"\n"
        )
    }
}

impl Descriptor {
    /// The text of a streamOptimized image for the file `name`, which must not contain quotes or line ends.
    ///
    /// VMware identifies the disk by `ddb.uuid`, VirtualBox by `ddb.uuid.image`. Everything is derived from the
    /// arguments: writing a disk twice gives the same stream twice.
    pub(super) fn text_of_stream(name: &str, sectors: u64, id: ImageId) -> String {
        let hex = id.0.map(|byte| format!("{byte:02x}")).concat();
        let [.., a, b, c, d] = id.0;
        // All ones would mean that there is no parent.
        let content_id = u32::from_be_bytes([a, b, c, d]) & 0x7fff_ffff;
        let cylinders = sectors.div_ceil(255 * 63).clamp(1, 65_535);
        let (nil, uuid) = (ImageId::NIL, of_vmware(id));
        format!(
            "# Disk DescriptorFile\nversion=1\nencoding=\"UTF-8\"\nCID={content_id:08x}\nparentCID={NO_PARENT:08x}\n\
             createType=\"streamOptimized\"\n\n# Extent description\nRW {sectors} SPARSE \"{name}\"\n\n# The Disk Data Base\n#DDB\n\n\
             ddb.virtualHWVersion = \"4\"\nddb.geometry.cylinders = \"{cylinders}\"\nddb.geometry.heads = \"255\"\n\
             ddb.geometry.sectors = \"63\"\nddb.adapterType = \"lsilogic\"\nddb.longContentID = \"{}{content_id:08x}\"\n\
             {IMAGE_OF_VMWARE} = \"{uuid}\"\n{IMAGE}=\"{id}\"\nddb.uuid.modification=\"{nil}\"\n{PARENT}=\"{nil}\"\n\
             ddb.uuid.parentmodification=\"{nil}\"\n",
            hex.get(..24).unwrap_or(&hex)
        )
    }
}

impl NamedExtent {
    /// Parses an extent line, such as `RW 4192256 SPARSE "web1-s001.vmdk"`; none if the line is no extent.
    fn parse(line: &str, image: &str, at: usize) -> Result<Option<Self>> {
        let mut words = line.split_whitespace();
        if !matches!(words.next(), Some("RW" | "RDONLY" | "NOACCESS")) {
            return Ok(None);
        }
        let wrong = || corrupt(image, "descriptor", at as u64, format!("invalid extent: {line:?}"));
        let sectors = words.next().and_then(|word| word.parse().ok()).ok_or_else(wrong)?;
        let kind = words.next().ok_or_else(wrong)?;
        let mut quoted = line.splitn(3, '"').skip(1);
        let mut name = || quoted.next().map(from_windows).ok_or_else(wrong);
        let kind = match kind {
            "ZERO" => NamedExtentKind::Zero,
            "SPARSE" => NamedExtentKind::Sparse { file: name()? },
            "FLAT" | "VMFS" => NamedExtentKind::Flat {
                file: name()?,
                offset: match quoted.next().unwrap_or_default().trim() {
                    "" => 0,
                    number => number.parse().map_err(|_| wrong())?,
                },
            },
            other => {
                return Err(Error::UnsupportedFeature {
                    image: image.to_owned(),
                    feature: format!("an extent of the kind {other}"),
                    detail: "clone or export it with its hypervisor".to_owned(),
                });
            }
        };
        Ok(Some(Self { sectors, kind }))
    }
}

pub(crate) const IMAGE: &str = "ddb.uuid.image";
pub(crate) const IMAGE_OF_VMWARE: &str = "ddb.uuid";
pub(crate) const PARENT: &str = "ddb.uuid.parent";

/// Parses a UUID in the notation of VirtualBox or VMware: `60 00 c2 9e 7d 51 4f 1a-8d 3c ...`.
pub(crate) fn parse_id(value: &str) -> Option<ImageId> {
    if let Ok(id) = value.parse() {
        return Some(id);
    }
    let digits: String = value
        .chars()
        .filter(|character| !matches!(character, ' ' | '-'))
        .collect();
    let number = u128::from_str_radix(&digits, 16).ok().filter(|_| digits.len() == 32)?;
    Some(ImageId(number.to_be_bytes()))
}

/// The notation of VMware.
pub(crate) fn of_vmware(id: ImageId) -> String {
    let pairs: Vec<String> = id.0.iter().map(|byte| format!("{byte:02x}")).collect();
    let halves: Vec<String> = pairs.chunks(8).map(|half| half.join(" ")).collect();
    halves.join("-")
}
