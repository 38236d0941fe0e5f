//! Keys: the master secret, the keys derived from it, and the slots that open it.
//!
//! A repository has one [`MasterSecret`], drawn at random when it is created. Every other key is derived from it, one
//! per [`Purpose`], so that no key is used for two purposes. The secret itself is stored in key slots: objects that
//! contain it sealed under a password or a key file, one slot per user, host or safe. A [`PaperKey`] is the secret as
//! text, in case all slots are lost.
//!
//! An unencrypted repository has an open slot, which needs no secret: the same code seals the same bytes, and damage is
//! detected in the same way. Formats and threat model: `docs/format/keys.md`.

mod error;
mod paper;
mod password;
pub(crate) mod purpose;
mod random;
mod seal;
mod sealed_object;
mod secret;
mod slot;
pub(crate) mod slot_info;
mod slots;

pub use error::{KeyError, Result};
pub use paper::PaperKey;
pub use password::Credential;
pub use purpose::Purpose;
pub use random::{Randomness, SystemRandomness};
pub use seal::{Cipher, NotSealed, SealingKey, TAG_LENGTH};
pub use sealed_object::{SEALED_OVERHEAD_BYTES, open_object, seal_object};
pub use secret::{FingerprintSecret, Keyring, MasterSecret};
pub use slot::{CONFIG_BYTES_MAX, LABEL_BYTES_MAX, SLOT_BYTES_MAX};
pub use slot_info::{CredentialKind, KdfParameters};
pub use slot_info::{SlotId, SlotInfo};
pub use slots::{
    NewSlot, Removal, SLOT_COUNT_MAX, SlotChoice, SlotListing, Unlocked, add, check_removal, list, remove, replace,
    unlock, unlock_chosen,
};
