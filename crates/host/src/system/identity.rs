//! Identifiers of machines: UUIDs and MAC addresses.

use std::fmt;

/// The prefix of QEMU's MAC addresses, which no vendor of network cards uses.
const MAC_PREFIX: [u8; 3] = [0x52, 0x54, 0x00];

/// A UUID.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Uuid([u8; 16]);

impl Uuid {
    /// A UUID of random bytes: version 4 of RFC 9562.
    pub fn from_random(mut bytes: [u8; 16]) -> Self {
        bytes[6] = bytes[6] & 0x0f | 0x40;
        bytes[8] = bytes[8] & 0x3f | 0x80;
        Self(bytes)
    }

    /// A UUID from any bytes.
    pub(crate) fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }

    pub(crate) fn as_bytes(&self) -> &[u8; 16] {
        &self.0
    }

    /// Parses a UUID in any form that libvirt accepts: with or without hyphens, in upper or lower case.
    pub fn parse(text: &str) -> Option<Self> {
        let digits: Vec<u8> = text.bytes().filter(|byte| *byte != b'-').collect();
        let mut bytes = [0; 16];
        if digits.len() != 2 * bytes.len() {
            return None;
        }
        for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
            let digit = |digit: u8| {
                char::from(digit)
                    .to_digit(16)
                    .and_then(|digit| u8::try_from(digit).ok())
            };
            *byte = digit(pair[0])? << 4 | digit(pair[1])?;
        }
        Some(Self(bytes))
    }
}

impl fmt::Display for Uuid {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, byte) in self.0.iter().enumerate() {
            if matches!(number, 4 | 6 | 8 | 10) {
                formatter.write_str("-")?;
            }
            write!(formatter, "{byte:02x}")?;
        }
        Ok(())
    }
}

/// A MAC address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MacAddress([u8; 6]);

impl MacAddress {
    /// An address with libvirt's prefix, and random bytes at its end.
    pub fn from_random(bytes: [u8; 3]) -> Self {
        let mut address = [0; 6];
        address[..3].copy_from_slice(&MAC_PREFIX);
        address[3..].copy_from_slice(&bytes);
        Self(address)
    }
}

impl fmt::Display for MacAddress {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, byte) in self.0.iter().enumerate() {
            if number > 0 {
                formatter.write_str(":")?;
            }
            write!(formatter, "{byte:02x}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::{MacAddress, Uuid};

    #[test]
    fn uuids_and_addresses_have_the_format_of_libvirt() {
        let uuid = Uuid::from_random([0xff; 16]).to_string();
        assert_eq!(uuid, "ffffffff-ffff-4fff-bfff-ffffffffffff");
        assert_eq!(
            Uuid::from_random([0; 16]).to_string(),
            "00000000-0000-4000-8000-000000000000"
        );
        assert_eq!(Uuid::parse(&uuid.to_uppercase()), Some(Uuid::from_random([0xff; 16])));
        assert_eq!(Uuid::parse(&uuid.replace('-', "")), Uuid::parse(&uuid));
        for text in [
            "",
            "../../../../../../etc/a/very/long/path",
            "ffffffff-ffff-4fff-bfff-fffffffffffg",
            &uuid[1..],
        ] {
            assert_eq!(Uuid::parse(text), None, "{text}");
        }
        assert_eq!(MacAddress::from_random([1, 0xab, 0]).to_string(), "52:54:00:01:ab:00");
    }
}
