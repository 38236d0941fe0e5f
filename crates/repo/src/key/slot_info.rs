//! The public information about a key slot.

use std::fmt;
use std::str::FromStr;

use crate::store::{BadName, ObjectKind, ObjectName, StoreError};

/// The kinds of [`Credential`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CredentialKind {
    /// A password.
    Password,
    /// A key file.
    KeyFile,
    /// Nothing.
    Open,
}

impl CredentialKind {
    /// The number that stands for the kind in stored slots.
    pub(crate) const fn code(self) -> u8 {
        match self {
            Self::Password => 1,
            Self::KeyFile => 2,
            Self::Open => 3,
        }
    }

    pub(crate) const fn from_code(code: u8) -> Option<Self> {
        match code {
            1 => Some(Self::Password),
            2 => Some(Self::KeyFile),
            3 => Some(Self::Open),
            _ => None,
        }
    }
}

impl fmt::Display for CredentialKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Password => "password",
            Self::KeyFile => "key file",
            Self::Open => "open key slot",
        })
    }
}

/// What a guess at a password costs: the parameters of Argon2id (RFC 9106), version 0x13.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct KdfParameters {
    /// Memory in KiB.
    pub memory_kib: u32,
    /// Passes over the memory.
    pub iterations: u32,
    /// Lanes; they are computed one after another.
    pub lanes: u32,
}

impl Default for KdfParameters {
    /// 32 MiB, 4 passes, 1 lane: a tenth of a second or two, and memory that the smallest host has.
    fn default() -> Self {
        Self {
            memory_kib: 32 << 10,
            iterations: 4,
            lanes: 1,
        }
    }
}

/// The identity of a slot: 8 random bytes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SlotId(pub(super) u64);

impl SlotId {
    /// The object that holds the slot.
    pub fn object(self) -> ObjectName {
        ObjectName::new(ObjectKind::Key, &self.to_string()).expect("16 digits are a name")
    }

    /// The slot that an object holds, if its name is that of one.
    pub fn from_object(name: &ObjectName) -> Option<Self> {
        match name.kind() {
            ObjectKind::Key => name.name().parse().ok(),
            _ => None,
        }
    }
}

impl fmt::Display for SlotId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl fmt::Debug for SlotId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SlotId({self})")
    }
}

impl FromStr for SlotId {
    type Err = StoreError;

    fn from_str(text: &str) -> Result<Self, StoreError> {
        let parsed = u64::from_str_radix(text, 16).ok().map(Self);
        parsed.filter(|id| id.to_string() == text).ok_or_else(|| {
            StoreError::BadName(BadName {
                text: text.to_owned(),
                reason: "a key slot is named by 16 hexadecimal digits",
            })
        })
    }
}

/// The public fields of a slot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SlotInfo {
    /// Its identity.
    pub id: SlotId,
    /// What opens it.
    pub kind: CredentialKind,
    /// What it is called: whose it is, or where.
    pub label: String,
    /// When it was made, in seconds since 1970.
    pub created_unix_seconds: u64,
    /// What a guess costs; none where nothing is to be guessed.
    pub parameters: Option<KdfParameters>,
}

impl fmt::Display for SlotInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.kind {
            CredentialKind::Open => "open",
            CredentialKind::Password => "password",
            CredentialKind::KeyFile => "key file",
        };
        write!(f, "{} ({kind}, {:?})", self.id, self.label)
    }
}
