//! A server's description of its exports.

use super::violation::Violation;
use crate::nbd::wire::{ExportFlags, Fields, PAYLOAD_BYTES_MAX, STRING_BYTES_MAX};

/// Block size to assume if the server reports none.
const PREFERRED_BLOCK_BYTES: u32 = 4096;
/// "If advertised, this value MUST be a power of 2, MUST NOT be larger than 2^16".
const MINIMUM_BLOCK_BYTES_MAX: u32 = 1 << 16;

/// An export in a server's list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListedExport {
    /// The name to connect with; the default export has an empty name.
    pub name: String,
    /// The server's description; may be empty.
    pub description: String,
}

impl ListedExport {
    /// Decodes a reply of `LIST`: u32 length of the name, name, description.
    pub(super) fn decode(data: &[u8]) -> Result<Self, Violation> {
        const WHAT: &str = "the length of an export's name";
        let Some((length, rest)) = data.split_first_chunk() else {
            return Err(Violation::Size {
                what: "the length of an entry of its list of exports",
                found: data.len() as u64,
                allowed: "at least 4",
            });
        };
        let length = u32::from_be_bytes(*length);
        let parts = usize::try_from(length)
            .ok()
            .and_then(|length| rest.split_at_checked(length));
        let Some((of_name, description)) = parts else {
            return Err(Violation::Size {
                what: WHAT,
                found: u64::from(length),
                allowed: "inside its entry of the list",
            });
        };
        Ok(Self {
            name: name(WHAT, of_name)?,
            description: printable(description),
        })
    }
}

/// A metadata context: its name, and its number on one connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct MetaContext {
    pub(super) id: u32,
    pub(super) name: String,
}

impl MetaContext {
    /// Decodes a reply of `SET_META_CONTEXT`: u32 number, name.
    pub(super) fn decode(data: &[u8]) -> Result<Self, Violation> {
        let Some((id, rest)) = data.split_first_chunk() else {
            return Err(Violation::Size {
                what: "the length of a metadata context",
                found: data.len() as u64,
                allowed: "at least 4",
            });
        };
        Ok(Self {
            id: u32::from_be_bytes(*id),
            name: name("the name of a metadata context", rest)?,
        })
    }
}

/// Constraints on requests, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockSizes {
    /// Every offset and length must be a multiple of this; a power of two, at most 64 KiB.
    pub minimum_bytes: u32,
    /// Smaller requests are slow; a power of two.
    pub preferred_bytes: u32,
    /// Largest read or write of one request.
    pub payload_max_bytes: u32,
}

impl BlockSizes {
    /// Decodes the block sizes, which follow the kind of the reply.
    pub(super) fn decode(data: &[u8]) -> Result<Self, Violation> {
        let size = |what, found: u32, allowed| Violation::Size {
            what,
            found: u64::from(found),
            allowed,
        };
        if data.len() != 12 {
            let length = u32::try_from(data.len()).unwrap_or(u32::MAX);
            return Err(size("the length of its block sizes", length, "12"));
        }
        let mut fields = Fields(data);
        let (minimum, preferred, payload_max) = (fields.u32(), fields.u32(), fields.u32());
        if !minimum.is_power_of_two() || minimum > MINIMUM_BLOCK_BYTES_MAX {
            let allowed = "a power of two and at most 65536";
            return Err(size("its minimum block size", minimum, allowed));
        }
        if payload_max < minimum.max(512) {
            let allowed = "at least 512 and the minimum block size";
            return Err(size("the longest payload that it takes", payload_max, allowed));
        }
        // The preferred size is only a hint: an invalid value is ignored.
        let preferred = if preferred.is_power_of_two() {
            preferred
        } else {
            PREFERRED_BLOCK_BYTES
        };
        Ok(Self {
            minimum_bytes: minimum,
            preferred_bytes: preferred.max(minimum).max(512),
            payload_max_bytes: payload_max.min(PAYLOAD_BYTES_MAX) / minimum * minimum,
        })
    }
}

impl Default for BlockSizes {
    /// The protocol's defaults.
    fn default() -> Self {
        Self {
            minimum_bytes: 1,
            preferred_bytes: PREFERRED_BLOCK_BYTES,
            payload_max_bytes: PAYLOAD_BYTES_MAX,
        }
    }
}

/// A server's description of one export.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExportInfo {
    name: String,
    size_bytes: u64,
    flags: ExportFlags,
    block_sizes: BlockSizes,
    description: String,
}

impl ExportInfo {
    pub(super) fn new(
        name: String,
        size_bytes: u64,
        flags: ExportFlags,
        block_sizes: Option<BlockSizes>,
        description: Option<String>,
    ) -> Self {
        Self {
            name,
            size_bytes,
            flags,
            block_sizes: block_sizes.unwrap_or_default(),
            description: description.unwrap_or_default(),
        }
    }

    /// The requested name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Size in bytes, less than 2^63.
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// The server's description; may be empty.
    pub fn description(&self) -> &str {
        &self.description
    }

    /// The constraints on requests.
    pub fn block_sizes(&self) -> BlockSizes {
        self.block_sizes
    }

    /// Whether writes are refused.
    pub fn is_read_only(&self) -> bool {
        self.flags.has(ExportFlags::READ_ONLY)
    }

    /// Whether the server can make writes durable.
    pub fn can_flush(&self) -> bool {
        self.flags.has(ExportFlags::FLUSH)
    }

    /// Whether all connections see each other's writes, and a flush on one connection covers all.
    pub fn is_multi_connection(&self) -> bool {
        self.flags.has(ExportFlags::MULTI_CONN)
    }

    pub(super) fn flags(&self) -> ExportFlags {
        self.flags
    }
}

/// Decodes a string of the handshake that must be text.
pub(super) fn name(what: &'static str, bytes: &[u8]) -> Result<String, Violation> {
    if bytes.len() > STRING_BYTES_MAX {
        return Err(Violation::Size {
            what,
            found: bytes.len() as u64,
            allowed: "at most 4096 bytes long",
        });
    }
    match std::str::from_utf8(bytes) {
        Ok(text) if !text.contains('\0') => Ok(text.to_owned()),
        _ => Err(Violation::NotText { what }),
    }
}

/// Decodes text for display: invalid and control characters are replaced.
pub(super) fn printable(bytes: &[u8]) -> String {
    let bytes = &bytes[..bytes.len().min(STRING_BYTES_MAX)];
    let harmless = |character: char| if character.is_control() { '\u{fffd}' } else { character };
    String::from_utf8_lossy(bytes).chars().map(harmless).collect()
}
