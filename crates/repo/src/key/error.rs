//! Errors of keys.

use super::{CredentialKind, Purpose, SlotId, SlotInfo};
use crate::store::{ObjectName, StoreError};

/// Result of an operation on keys.
pub type Result<T> = std::result::Result<T, KeyError>;

/// An error about keys.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KeyError {
    /// The store returned an error.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The operating system gave no random bytes.
    #[error("the operating system gives no random bytes")]
    NoRandomness,
    /// The object is too short, or its content is invalid.
    #[error("object {name} is damaged: {detail}")]
    Damaged {
        /// The object.
        name: ObjectName,
        /// The problem.
        detail: &'static str,
    },
    /// The object has an unknown version.
    #[error("object {name} has format version {version}, and this program knows versions up to {known}")]
    Version {
        /// The object.
        name: ObjectName,
        /// Its version.
        version: u32,
        /// The latest known version.
        known: u32,
    },
    /// The object is sealed for another purpose: it was put in place of another object.
    #[error("object {name} is sealed for another purpose ({actual}) than {expected:?}")]
    WrongPurpose {
        /// The object.
        name: ObjectName,
        /// Its expected purpose.
        expected: Purpose,
        /// The code of its actual purpose.
        actual: u16,
    },
    /// Authentication failed: wrong key, wrong name, or changed bytes.
    #[error("object {name} was sealed with another key or is damaged")]
    WrongKeyOrDamaged {
        /// The object.
        name: ObjectName,
    },
    /// Costs of Argon2 are out of bounds.
    #[error("{value} is no {what} for Argon2: it must be from {least} to {most}")]
    Parameters {
        /// The parameter.
        what: &'static str,
        /// The value.
        value: u32,
        /// The minimum.
        least: u32,
        /// The maximum.
        most: u32,
    },
    /// There is not enough memory for Argon2.
    #[error("there are no {memory_kib} KiB of memory for Argon2")]
    NoMemory {
        /// The required memory, in KiB.
        memory_kib: u32,
    },
    /// A password or key file is unusable.
    #[error("this {kind} cannot be used: {detail}")]
    Credential {
        /// The kind of credential.
        kind: CredentialKind,
        /// The problem.
        detail: &'static str,
    },
    /// The label of a new slot is too long.
    #[error("the label has {length} bytes, and {length_max} is the limit")]
    LabelTooLong {
        /// Its length in bytes.
        length: u64,
        /// The limit in bytes.
        length_max: u64,
    },
    /// The configuration does not fit into a slot.
    #[error("the configuration has {length} bytes, and a key slot takes {length_max}")]
    ConfigTooLong {
        /// Its length in bytes.
        length: u64,
        /// The limit in bytes.
        length_max: u64,
    },
    /// There are no key slots: no repository, or all of them are lost.
    #[error("{store} has no key slots")]
    NoSlots {
        /// The store.
        store: String,
    },
    /// There are slots, but none for this kind of credential.
    #[error("no key slot of {store} opens {}; there are: {}", with_credential(*kind), describe(present))]
    NoSlotFor {
        /// The store.
        store: String,
        /// The kind of credential.
        kind: CredentialKind,
        /// The existing slots.
        present: Vec<SlotInfo>,
    },
    /// None of the slots for this kind of credential could be opened.
    #[error("none of the key slots of {store} opens {}; tried: {}{}", with_this_credential(*kind), describe(tried), describe_damaged(damaged))]
    WrongCredential {
        /// The store.
        store: String,
        /// The kind of credential.
        kind: CredentialKind,
        /// The slots that were tried.
        tried: Vec<SlotInfo>,
        /// Slots that could not be tried.
        damaged: Vec<SlotId>,
    },
    /// There are too many slots.
    #[error("{store} has more than {count_max} key slots")]
    TooManySlots {
        /// The store.
        store: String,
        /// The limit.
        count_max: usize,
    },
    /// There are more slots than are tried, and none of the tried ones could be opened.
    #[error(
        "none of the {tried_count} key slots of {store} that were tried opens with this {kind}, and there are more than are tried: an attacker may have added them"
    )]
    SlotsNotTried {
        /// The store.
        store: String,
        /// The kind of credential.
        kind: CredentialKind,
        /// Number of slots that were tried.
        tried_count: usize,
    },
    /// There is no such slot.
    #[error("there is no key slot {id}")]
    NoSuchSlot {
        /// The slot.
        id: SlotId,
    },
    /// The last slot cannot be removed, since nothing else would open the repository.
    #[error("key slot {id} is the last one: without it only a paper key opens the repository")]
    LastSlot {
        /// The slot.
        id: SlotId,
    },
    /// A new slot could not be opened again; it was removed, and the old ones are kept.
    #[error("the new key slot {id} does not open with what it was made with")]
    SlotUnreadable {
        /// The slot.
        id: SlotId,
    },
    /// The text is not a paper key.
    #[error("this is no paper key: {detail}")]
    NoPaperKey {
        /// The reason.
        detail: &'static str,
    },
    /// A paper key of an unknown version.
    #[error("the paper key has version {version:?}, and this program knows version 1")]
    PaperKeyVersion {
        /// Its version symbol.
        version: char,
    },
    /// One group of a paper key has too few or too many characters, or there are too few or too many groups.
    #[error("the paper key has {actual} characters in group {group} where 5 belong")]
    PaperKeyGroupLength {
        /// The group, counted from 1 after the `HF1`.
        group: usize,
        /// Its characters.
        actual: usize,
    },
    /// The paper key as a whole has too few or too many characters.
    #[error("the paper key has {actual} characters after its first group where {expected} belong")]
    PaperKeyLength {
        /// How many there should be.
        expected: usize,
        /// How many there are.
        actual: usize,
    },
    /// A character that does not occur in paper keys.
    #[error("the paper key has the character {character:?} in group {group}, which never occurs in one")]
    PaperKeyCharacter {
        /// The group, counted from 1 after the `HF1`.
        group: usize,
        /// The character.
        character: char,
    },
    /// The check character of a group is wrong.
    #[error("group {group} of the paper key has a wrong character, or is in the wrong place")]
    PaperKeyGroup {
        /// The group, counted from 1 after the `HF1`.
        group: usize,
    },
    /// The check characters of all groups are correct, but the checksum of the key is not.
    #[error("the groups of the paper key do not belong together")]
    PaperKeyMixed,
}

fn with_credential(kind: CredentialKind) -> &'static str {
    match kind {
        CredentialKind::Password => "with a password",
        CredentialKind::KeyFile => "with a key file",
        CredentialKind::Open => "without a password or key file",
    }
}

fn with_this_credential(kind: CredentialKind) -> &'static str {
    match kind {
        CredentialKind::Password => "with this password",
        CredentialKind::KeyFile => "with this key file",
        CredentialKind::Open => with_credential(kind),
    }
}

fn describe(slots: &[SlotInfo]) -> String {
    if slots.is_empty() {
        return "none".to_owned();
    }
    slots.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

fn describe_damaged(slots: &[SlotId]) -> String {
    match slots {
        [] => String::new(),
        slots => {
            let ids: Vec<_> = slots.iter().map(ToString::to_string).collect();
            format!("; damaged and not tried: {}", ids.join(", "))
        }
    }
}
