//! `key`: the keys that open a repository.

use holdfast_repo::key::{self, Credential, KdfParameters, NewSlot, PaperKey, Removal, SlotId, SlotListing, Unlocked};
use holdfast_repo::store::Store;
use holdfast_repo::{Environment, InitRequest, Repository};

use super::open::paper_key_text;
use crate::job::{Error, Result};
use crate::{Location, Unlock};

/// Least bytes of a new password.
const PASSWORD_BYTES_MIN: usize = 8;
/// Least different characters of a new password.
const PASSWORD_CHARACTERS_MIN: usize = 4;
/// Common passwords that the other rules accept.
const COMMON: [&str; 12] = [
    "password",
    "passw0rd",
    "password1",
    "passphrase",
    "12345678",
    "123456789",
    "1234567890",
    "qwertyuiop",
    "qwerty123",
    "iloveyou",
    "holdfast",
    "changeme",
];

/// Refuses a password that is easily guessed: the data must stay secret even from the operator of the store.
pub fn check_password(password: &[u8]) -> Result<()> {
    let weak = |reason| Err(Error::WeakPassword { reason });
    if password.is_empty() {
        return weak("it is empty");
    }
    if password.len() < PASSWORD_BYTES_MIN {
        return weak("it has less than 8 characters");
    }
    let mut different = password.to_vec();
    different.sort_unstable();
    different.dedup();
    if different.len() < PASSWORD_CHARACTERS_MIN {
        return weak("it has less than 4 different characters");
    }
    if COMMON
        .iter()
        .any(|common| password.eq_ignore_ascii_case(common.as_bytes()))
    {
        return weak("it is on every list of common passwords");
    }
    Ok(())
}

/// All key slots of the repository at `location`; opens none of them.
pub fn list_keys(location: &Location) -> Result<SlotListing> {
    Ok(key::list(&*location.open_store()?)?)
}

/// Adds a password to a repository; existing passwords stay valid.
pub fn add_key(repository: &Repository, password: &[u8], label: &str) -> Result<SlotId> {
    check_password(password)?;
    Ok(repository.add_key(&InitRequest {
        credential: Credential::Password(password),
        label,
        parameters: KdfParameters::default(),
        cipher: repository.config().cipher(),
    })?)
}

/// Removes a key slot; never the last one.
///
/// Needs no password: any process that can write to the store can remove its slots.
pub fn remove_key(location: &Location, slot: SlotId, environment: &Environment) -> Result<()> {
    let store = location.open_store()?;
    Ok(key::remove(&*store, slot, Removal::KeepLast, &*environment.randomness)?)
}

/// Checks that a key slot could be removed; changes nothing.
pub fn plan_key_removal(location: &Location, slot: SlotId) -> Result<()> {
    Ok(key::check_removal(&*location.open_store()?, slot)?)
}

/// The replaced slot and its replacement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RotateReport {
    /// The removed slot.
    pub old: SlotId,
    /// The new slot.
    pub new: SlotId,
}

/// Replaces the password that opens the repository with a new one; nothing else is written.
///
/// The new slot is durable and has been opened once before the old slot is removed.
pub fn rotate_key(
    location: &Location,
    unlock: Unlock<'_>,
    password: &[u8],
    label: Option<&str>,
    repository: &Repository,
    environment: &Environment,
) -> Result<RotateReport> {
    check_password(password)?;
    let store = location.open_store()?;
    let old = unlocked(location, &*store, unlock)?;
    let new = replacement(&old, password, label, repository, environment);
    let new = key::replace(&*store, &old, &new, &*environment.randomness)?;
    Ok(RotateReport { old: old.slot.id, new })
}

/// The key slot that [`rotate_key`] would replace; changes nothing.
pub fn plan_rotation(location: &Location, unlock: Unlock<'_>, password: &[u8]) -> Result<SlotId> {
    check_password(password)?;
    let store = location.open_store()?;
    Ok(unlocked(location, &*store, unlock)?.slot.id)
}

/// The slot that opens the repository.
fn unlocked(location: &Location, store: &dyn Store, unlock: Unlock<'_>) -> Result<Unlocked> {
    match key::unlock_chosen(store, unlock.credential(), location.slot_choice()) {
        Err(_) if matches!(unlock, Unlock::Password(password) if paper_key_text(password).is_some()) => {
            Err(Error::NoSlotUsed)
        }
        other => Ok(other?),
    }
}

fn replacement<'a>(
    old: &'a Unlocked,
    password: &'a [u8],
    label: Option<&'a str>,
    repository: &Repository,
    environment: &Environment,
) -> NewSlot<'a> {
    NewSlot {
        credential: Credential::Password(password),
        parameters: KdfParameters::default(),
        label: label.unwrap_or(&old.slot.label),
        created_unix_seconds: u64::try_from((environment.now_ms)() / 1000).unwrap_or_default(),
        cipher: repository.config().cipher(),
    }
}

/// The repository's secret as text for paper.
pub fn paper_key(repository: &Repository) -> PaperKey {
    PaperKey::encode(repository.master())
}

#[cfg(test)]
mod tests {
    use super::check_password;

    #[test]
    fn what_a_guesser_finds_at_once_is_refused() {
        for weak in [
            "",
            "short",
            "1234567",
            "aaaaaaaaaaaaaaa",
            "abababababab",
            "PassWord1",
            "changeme",
        ] {
            assert!(check_password(weak.as_bytes()).is_err(), "{weak}");
        }
        for good in ["correct horse", "Zx9!kw02", "größer als 8"] {
            assert!(check_password(good.as_bytes()).is_ok(), "{good}");
        }
    }
}
