//! Reparse points: links and junctions, and files whose content is stored in another way.

use crate::fields::{Fields, utf8_of_utf16};
use crate::{Error, FileKind, Result};

/// Reparse points and links of Interix have at most 16 KiB.
pub(super) const BYTES_MAX: usize = 16 << 10;

const TAG_MOUNT_POINT: u32 = 0xa000_0003;
const TAG_LINK: u32 = 0xa000_000c;
const TAG_LINUX_LINK: u32 = 0xa000_001d;
/// Socket, named pipe, character and block device of the Linux subsystem.
const TAGS_SPECIAL: [u32; 4] = [0x8000_0023, 0x8000_0024, 0x8000_0025, 0x8000_0026];

/// The start of a link that Interix or ntfs-3g wrote; devices begin with `IntxCHR` and `IntxBLK`.
pub(super) const INTERIX_MAGIC: &[u8] = b"Intx";
const INTERIX_LINK: &[u8] = b"IntxLNK\x01";

/// A reparse point.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ReparsePoint {
    tag: u32,
    data: Vec<u8>,
}

impl ReparsePoint {
    pub(super) fn parse(bytes: &[u8]) -> Result<Self> {
        let fields = Fields::new("NTFS reparse point", bytes);
        let length = usize::from(fields.u16(4)?);
        Ok(Self {
            tag: fields.u32(0)?,
            data: fields.bytes(8, length)?.to_vec(),
        })
    }

    /// What the file is, if it is neither a regular file nor a directory.
    pub(super) fn kind(&self) -> Option<FileKind> {
        match self.tag {
            TAG_MOUNT_POINT | TAG_LINK | TAG_LINUX_LINK => Some(FileKind::Link),
            tag if TAGS_SPECIAL.contains(&tag) => Some(FileKind::Special),
            _ => None,
        }
    }

    /// Why the content of a regular file cannot be read.
    pub(super) fn refusal(&self) -> Error {
        let what = match self.tag {
            0x8000_0017 => "compression of Windows system files (WOF)".to_owned(),
            0x8000_0013 => "deduplication of Windows".to_owned(),
            tag if tag & 0xffff_0fff == 0x9000_001a => "a file whose content is in a cloud".to_owned(),
            tag => format!("a file with reparse tag {tag:#010x}"),
        };
        Error::unsupported(what)
    }

    /// The target of a link or junction, with `/` between its components.
    pub(super) fn target(&self) -> Result<Vec<u8>> {
        let fields = Fields::new("NTFS reparse point", &self.data);
        let names_at = match self.tag {
            TAG_LINUX_LINK => return Ok(fields.from(4)?.as_slice().to_vec()),
            TAG_MOUNT_POINT => 8,
            TAG_LINK => 12,
            _ => return Err(Error::NotAFile),
        };
        // The print name is what Windows shows; some programs leave it empty.
        let names = fields.from(names_at)?;
        let print = names.bytes(usize::from(fields.u16(4)?), usize::from(fields.u16(6)?))?;
        let name = if print.is_empty() {
            names.bytes(usize::from(fields.u16(0)?), usize::from(fields.u16(2)?))?
        } else {
            print
        };
        let name = utf8_of_utf16(name);
        if name.is_empty() || name.contains(&0) {
            return Err(fields.damaged("its target is invalid"));
        }
        Ok(name
            .into_iter()
            .map(|byte| if byte == b'\\' { b'/' } else { byte })
            .collect())
    }
}

/// What a file of Interix is.
pub(super) fn interix_kind(content: &[u8]) -> FileKind {
    if content.starts_with(INTERIX_LINK) {
        FileKind::Link
    } else if content.starts_with(b"IntxCHR\0") || content.starts_with(b"IntxBLK\0") {
        FileKind::Special
    } else {
        FileKind::File
    }
}

/// The target of a link of Interix.
pub(super) fn interix_target(content: &[u8]) -> Option<Vec<u8>> {
    let target = utf8_of_utf16(content.strip_prefix(INTERIX_LINK)?);
    (!target.is_empty() && !target.contains(&0)).then_some(target)
}
