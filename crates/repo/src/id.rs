//! The ids of the repository, each of a separate type.

use std::fmt;
use std::str::FromStr;

macro_rules! identity {
    ($(#[$doc:meta])* $name:ident, $length:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub(crate) [u8; $length]);

        impl $name {
            /// Bytes of an identity.
            pub const LENGTH: usize = $length;

            /// The bytes, as stored.
            pub fn as_bytes(&self) -> &[u8; $length] {
                &self.0
            }

            /// An identity from its bytes.
            pub const fn from_bytes(bytes: [u8; $length]) -> Self {
                Self(bytes)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}({self})", stringify!($name))
            }
        }

        impl FromStr for $name {
            type Err = ParseIdError;

            fn from_str(text: &str) -> Result<Self, ParseIdError> {
                let mut bytes = [0; $length];
                decode_hex(text, &mut bytes)?;
                Ok(Self(bytes))
            }
        }

        impl serde::Serialize for $name {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> serde::Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let text = <std::borrow::Cow<'de, str>>::deserialize(deserializer)?;
                text.parse().map_err(serde::de::Error::custom)
            }
        }
    };
}

identity!(
    /// The id of a chunk: the keyed hash of its bytes. Equal ids mean equal bytes.
    ChunkId,
    32
);
identity!(
    /// The id of a pack: random, drawn when the pack is begun, so that it can be referred to before it is
    /// complete.
    PackId,
    16
);
identity!(
    /// The id of a snapshot: random, drawn when the backup starts, so that its object name can be claimed or
    /// blocked.
    SnapshotId,
    16
);
identity!(
    /// The id of a process run that writes to the repository.
    WriterId,
    16
);
identity!(
    /// The id of an index segment.
    SegmentId,
    16
);
identity!(
    /// The id of a repository, which never changes.
    RepositoryId,
    16
);

impl SnapshotId {
    /// The first 8 hex digits, enough to distinguish snapshots in messages.
    pub fn short(&self) -> String {
        self.to_string()[..8].to_owned()
    }
}

/// The text is not an id: wrong length, or a character that is not a lower-case hex digit.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("\"{text}\" is not {digits} lower-case hex digits")]
pub struct ParseIdError {
    text: String,
    digits: usize,
}

fn decode_hex(text: &str, bytes: &mut [u8]) -> Result<(), ParseIdError> {
    let wrong = || ParseIdError {
        text: text.chars().take(80).collect(),
        digits: bytes.len() * 2,
    };
    let digits = text.as_bytes();
    if digits.len() != bytes.len() * 2 {
        return Err(wrong());
    }
    let value = |digit: u8| match digit {
        b'0'..=b'9' => Some(digit - b'0'),
        b'a'..=b'f' => Some(digit - b'a' + 10),
        _ => None,
    };
    let decoded: Option<Vec<u8>> = digits
        .chunks_exact(2)
        .map(|pair| Some(value(pair[0])? << 4 | value(pair[1])?))
        .collect();
    bytes.copy_from_slice(&decoded.ok_or_else(wrong)?);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::PackId;

    #[test]
    fn text_and_bytes_round_trip_and_strange_text_is_refused() {
        let id = PackId::from_bytes(*b"0123456789abcdef");
        assert_eq!(id.to_string(), "30313233343536373839616263646566");
        assert_eq!(id.to_string().parse(), Ok(id));
        for bad in [
            "",
            "3031",
            "3031323334353637383961626364656G",
            "30313233343536373839616263646566ff",
        ] {
            assert!(bad.parse::<PackId>().is_err(), "{bad}");
        }
    }
}
