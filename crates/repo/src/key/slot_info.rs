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
    /// The code of the kind in stored slots.
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

/// The cost of guessing a password: the parameters of Argon2id (RFC 9106), version 0x13.
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
    /// 32 MiB, 4 passes, 1 lane: 0.1 to 0.2 seconds, with memory that the smallest host has.
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

    /// The slot in an object, if its name is that of a slot.
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
    /// The kind of credential that opens it.
    pub kind: CredentialKind,
    /// Its label: the owner or the place of the credential.
    pub label: String,
    /// Creation time, in seconds since 1970.
    pub created_unix_seconds: u64,
    /// The cost of a guess; `None` if nothing can be guessed.
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
