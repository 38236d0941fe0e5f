//! Derives the key of a slot from a password or a key file.

use std::fmt;

use argon2::{Algorithm, Argon2, Block, Params, Version};
use zeroize::{Zeroize, Zeroizing};

use super::{KeyError, Result};
use crate::key::slot_info::{CredentialKind, KdfParameters};

/// Bytes of a slot's salt.
pub(super) const SALT_BYTES: usize = 32;
/// Minimum bytes of a key file: it is not stretched, so it must be impossible to guess.
const KEY_FILE_BYTES_MIN: usize = 32;

/// A credential that opens a slot.
#[derive(Clone, Copy)]
pub enum Credential<'a> {
    /// A password, byte for byte as typed.
    Password(&'a [u8]),
    /// The contents of a key file: at least 32 unpredictable bytes.
    KeyFile(&'a [u8]),
    /// Nothing: the repository is not encrypted.
    Open,
}

impl Credential<'_> {
    /// The kind of the credential.
    pub const fn kind(&self) -> CredentialKind {
        match self {
            Self::Password(_) => CredentialKind::Password,
            Self::KeyFile(_) => CredentialKind::KeyFile,
            Self::Open => CredentialKind::Open,
        }
    }

    /// Returns an error if the credential is too weak to protect a repository.
    pub(super) fn check(&self) -> Result<()> {
        let detail = match self {
            Self::Password([]) => "it is empty",
            Self::KeyFile(bytes) if bytes.len() < KEY_FILE_BYTES_MIN => "it has less than 32 bytes",
            _ => return Ok(()),
        };
        Err(KeyError::Credential {
            kind: self.kind(),
            detail,
        })
    }

    /// The key of the slot with `salt`; `parameters` apply to passwords only.
    pub(super) fn slot_key(&self, parameters: KdfParameters, salt: &[u8; SALT_BYTES]) -> Result<Zeroizing<[u8; 32]>> {
        match self {
            Self::Password(password) => parameters.stretch(password, salt),
            Self::KeyFile(bytes) => Ok(derive("holdfast 2026 key slot v1 key file", salt, bytes)),
            Self::Open => Ok(derive("holdfast 2026 key slot v1 open", salt, &[])),
        }
    }
}

impl fmt::Debug for Credential<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Credential::{:?}(..)", self.kind())
    }
}

fn derive(context: &str, salt: &[u8; SALT_BYTES], material: &[u8]) -> Zeroizing<[u8; 32]> {
    let mut hasher = blake3::Hasher::new_derive_key(context);
    hasher.update(salt);
    hasher.update(material);
    Zeroizing::new(*hasher.finalize().as_bytes())
}

impl KdfParameters {
    /// Limits on parameters in slots, so that a malicious slot cannot exhaust memory or time.
    const LIMITS: Self = Self {
        memory_kib: 1 << 20,
        iterations: 64,
        lanes: 16,
    };

    /// Returns an error if parameters are out of bounds.
    pub fn check(self) -> Result<()> {
        let check = |what, value, least, most| {
            if (least..=most).contains(&value) {
                return Ok(());
            }
            Err(KeyError::Parameters {
                what,
                value,
                least,
                most,
            })
        };
        check("number of lanes", self.lanes, 1, Self::LIMITS.lanes)?;
        check("number of iterations", self.iterations, 1, Self::LIMITS.iterations)?;
        let memory_kib = self.memory_kib;
        check(
            "amount of memory in KiB",
            memory_kib,
            8 * self.lanes,
            Self::LIMITS.memory_kib,
        )
    }

    /// The cost of a guess, for comparison: KiB written.
    pub(crate) fn cost(self) -> u64 {
        u64::from(self.memory_kib) * u64::from(self.iterations)
    }

    fn stretch(self, password: &[u8], salt: &[u8; SALT_BYTES]) -> Result<Zeroizing<[u8; 32]>> {
        self.check()?;
        let no_memory = |_| KeyError::NoMemory {
            memory_kib: self.memory_kib,
        };
        let params =
            Params::new(self.memory_kib, self.iterations, self.lanes, Some(32)).expect("parameters were checked");
        let mut memory = Vec::new();
        memory.try_reserve_exact(params.block_count()).map_err(no_memory)?;
        memory.resize(params.block_count(), Block::new());
        let mut key = Zeroizing::new([0; 32]);
        let hashed = Argon2::new(Algorithm::Argon2id, Version::V0x13, params).hash_password_into_with_memory(
            password,
            salt,
            &mut *key,
            &mut memory[..],
        );
        // The last blocks determine the key, so they are wiped.
        memory.zeroize();
        hashed.map_err(|_| KeyError::Credential {
            kind: CredentialKind::Password,
            detail: "it is longer than 4 GiB",
        })?;
        Ok(key)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_input_changes_the_key_of_a_slot() {
        let parameters = KdfParameters {
            memory_kib: 16,
            iterations: 1,
            lanes: 1,
        };
        let key = |credential: Credential<'_>, parameters: KdfParameters, salt: u8| {
            *credential.slot_key(parameters, &[salt; SALT_BYTES]).unwrap()
        };
        let file = [3; 32];
        let keys = [
            key(Credential::Password(b"a"), parameters, 1),
            key(Credential::Password(b"b"), parameters, 1),
            key(Credential::Password(b"a"), parameters, 2),
            key(
                Credential::Password(b"a"),
                KdfParameters {
                    iterations: 2,
                    ..parameters
                },
                1,
            ),
            key(
                Credential::Password(b"a"),
                KdfParameters {
                    memory_kib: 32,
                    ..parameters
                },
                1,
            ),
            key(Credential::Password(b"a"), KdfParameters { lanes: 2, ..parameters }, 1),
            key(Credential::KeyFile(&file), parameters, 1),
            key(Credential::KeyFile(&file), parameters, 2),
            key(Credential::Open, parameters, 1),
            key(Credential::Open, parameters, 2),
        ];
        for (at, key) in keys.iter().enumerate() {
            assert!(!keys[..at].contains(key), "key {at}");
        }
        assert_eq!(key(Credential::Password(b"a"), parameters, 1), keys[0]);
    }

    #[test]
    fn parameters_out_of_bounds_are_refused_before_memory_is_taken() {
        let good = KdfParameters::default();
        good.check().unwrap();
        KdfParameters::LIMITS.check().unwrap();
        for bad in [
            KdfParameters {
                memory_kib: (1 << 20) + 1,
                ..good
            },
            KdfParameters {
                memory_kib: u32::MAX,
                ..good
            },
            KdfParameters { memory_kib: 7, ..good },
            KdfParameters {
                memory_kib: 15,
                lanes: 2,
                ..good
            },
            KdfParameters { iterations: 0, ..good },
            KdfParameters { iterations: 65, ..good },
            KdfParameters { lanes: 0, ..good },
            KdfParameters { lanes: 17, ..good },
            KdfParameters {
                lanes: u32::MAX,
                ..good
            },
        ] {
            let refused = Credential::Password(b"a").slot_key(bad, &[0; SALT_BYTES]);
            assert!(matches!(refused, Err(KeyError::Parameters { .. })), "{bad:?}");
        }
    }

    #[test]
    fn weak_passwords_are_refused_and_never_shown() {
        assert!(Credential::Password(b"").check().is_err());
        assert!(Credential::KeyFile(&[1; 31]).check().is_err());
        Credential::Password(b"x").check().unwrap();
        Credential::KeyFile(&[1; 32]).check().unwrap();
        assert_eq!(
            format!("{:?}", Credential::Password(b"abc")),
            "Credential::Password(..)"
        );
    }
}
