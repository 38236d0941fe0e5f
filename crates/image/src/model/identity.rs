//! The identifiers that formats store, by which hypervisors and child images recognize an image.

use std::fmt;
use std::str::FromStr;

use rustix::rand::{GetRandomFlags, getrandom};

use crate::{Error, Result};

/// A UUID (RFC 9562), in the byte order of its text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct ImageId(pub [u8; 16]);

impl ImageId {
    /// The nil identity.
    pub const NIL: Self = Self([0; 16]);

    /// A random UUID, version 4.
    pub fn random() -> Result<Self> {
        let mut bytes = [0; 16];
        let mut filled = 0;
        while filled < bytes.len() {
            match getrandom(&mut bytes[filled..], GetRandomFlags::empty()) {
                Ok(count) => filled += count,
                Err(rustix::io::Errno::INTR) => {}
                Err(errno) => {
                    return Err(Error::Device(holdfast_block::Error::io(
                        "get random bytes",
                        0,
                        std::io::Error::from(errno),
                    )));
                }
            }
        }
        bytes[6] = bytes[6] & 0x0f | 0x40;
        bytes[8] = bytes[8] & 0x3f | 0x80;
        Ok(Self(bytes))
    }

    /// Whether it is [`NIL`](Self::NIL).
    pub fn is_nil(self) -> bool {
        self == Self::NIL
    }

    /// From the mixed-endian order that Microsoft uses for GUIDs and VirtualBox for UUIDs: the first three fields are
    /// little-endian.
    pub(crate) fn from_guid(bytes: [u8; 16]) -> Self {
        Self(swapped(bytes))
    }

    /// To the same order.
    pub(crate) fn to_guid(self) -> [u8; 16] {
        swapped(self.0)
    }
}

fn swapped(mut bytes: [u8; 16]) -> [u8; 16] {
    bytes[0..4].reverse();
    bytes[4..6].reverse();
    bytes[6..8].reverse();
    bytes
}

impl fmt::Display for ImageId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, byte) in self.0.iter().enumerate() {
            if matches!(at, 4 | 6 | 8 | 10) {
                formatter.write_str("-")?;
            }
            write!(formatter, "{byte:02x}")?;
        }
        Ok(())
    }
}

/// Parses a UUID with or without braces, in upper or lower case.
impl FromStr for ImageId {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let wrong = || Error::InvalidOption {
            option: "uuid",
            detail: format!("{text:?} is not a UUID such as 7c0bd2a4-0d5e-4f0f-9d2e-5b1c6a7d8e9f"),
        };
        let inner = text
            .strip_prefix('{')
            .and_then(|rest| rest.strip_suffix('}'))
            .unwrap_or(text);
        let is_well_formed = inner.len() == 36
            && inner.bytes().enumerate().all(|(at, byte)| match at {
                8 | 13 | 18 | 23 => byte == b'-',
                _ => byte.is_ascii_hexdigit(),
            });
        if !is_well_formed {
            return Err(wrong());
        }
        let digits: String = inner.chars().filter(|character| *character != '-').collect();
        let mut bytes = [0; 16];
        for (byte, pair) in bytes.iter_mut().zip(digits.as_bytes().chunks(2)) {
            let pair = std::str::from_utf8(pair).map_err(|_| wrong())?;
            *byte = u8::from_str_radix(pair, 16).map_err(|_| wrong())?;
        }
        Ok(Self(bytes))
    }
}

/// Fails if both identities are the same: a hypervisor that identifies images by them would read the wrong one.
pub(crate) fn require_other_id(own: ImageId, other: Option<ImageId>) -> Result<()> {
    if other == Some(own) {
        return Err(Error::InvalidOption {
            option: "uuid",
            detail: format!("{own} belongs to another image of its chain"),
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::ImageId;

    #[test]
    fn uuid_text_and_bytes_round_trip() {
        let id: ImageId = "{7C0BD2A4-0d5e-4f0f-9d2e-5b1c6a7d8e9f}".parse().unwrap();
        assert_eq!(id.to_string(), "7c0bd2a4-0d5e-4f0f-9d2e-5b1c6a7d8e9f");
        assert_eq!(id.to_guid()[..8], [0xa4, 0xd2, 0x0b, 0x7c, 0x5e, 0x0d, 0x0f, 0x4f]);
        assert_eq!(ImageId::from_guid(id.to_guid()), id);
        for wrong in [
            "",
            "7c0bd2a4",
            "7c0bd2a4-0d5e-4f0f-9d2e-5b1c6a7d8e9g",
            "7c0bd2a4x0d5e-4f0f-9d2e-5b1c6a7d8e9f",
            "€€€€€€€€€€€€",
        ] {
            assert!(wrong.parse::<ImageId>().is_err(), "{wrong}");
        }
        let random = ImageId::random().unwrap();
        assert!(random != ImageId::random().unwrap() && random.to_string().as_bytes()[14] == b'4');
    }
}
