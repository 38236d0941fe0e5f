//! Making a repository, and opening it.

use std::sync::Arc;

use crate::environment::Surroundings;
use crate::error::{Error, Result};
use crate::format::config::{CONFIG_OBJECT_BYTES_MAX, RepositoryConfig};
use crate::id::RepositoryId;
use crate::key;
use crate::key::{
    Cipher, Credential, FingerprintSecret, KdfParameters, MasterSecret, NewSlot, Purpose, SlotChoice, SlotId,
};
use crate::repository::Repository;
use crate::store::{BadName, ObjectKind, ObjectName, Put, Store, StoreError};
use crate::vault::Vault;

/// How to make a repository.
#[derive(Debug, Clone)]
pub struct InitRequest<'a> {
    /// What opens the first key slot.
    pub credential: Credential<'a>,
    /// What to call that slot.
    pub label: &'a str,
    /// What a guess at a passphrase costs.
    pub parameters: KdfParameters,
    /// What to seal with.
    pub cipher: Cipher,
}

/// A repository that was opened, and what was noticed on the way.
pub struct Opened {
    /// The repository.
    pub repository: Repository,
    /// Damage that did not keep it from opening.
    pub warnings: Vec<Error>,
    /// The key slot that opened.
    pub slot: SlotId,
}

impl Repository {
    /// Makes a repository on an empty store.
    ///
    /// The key slot comes first and the configuration last: only with the configuration is it a repository, and of two who
    /// make one at once, one comes first. What an interrupted attempt left is cleared away.
    pub fn init(store: Arc<dyn Store>, request: &InitRequest<'_>, surroundings: Surroundings) -> Result<Self> {
        Self::init_with(store, request, None, surroundings)
    }

    /// Makes a repository that cuts and names bytes as `other` does, so that what is copied between the two is recognised.
    /// It has a secret of its own: neither opens the other.
    pub fn init_like(
        store: Arc<dyn Store>,
        request: &InitRequest<'_>,
        other: &Self,
        surroundings: Surroundings,
    ) -> Result<Self> {
        Self::init_with(store, request, Some(other.vault.keyring.fingerprints()), surroundings)
    }

    fn init_with(
        store: Arc<dyn Store>,
        request: &InitRequest<'_>,
        fingerprints: Option<FingerprintSecret>,
        surroundings: Surroundings,
    ) -> Result<Self> {
        let already = || Error::AlreadyARepository {
            store: store.describe(),
        };
        if exists(&*store, &ObjectName::config())? {
            return Err(already());
        }
        for kind in ObjectKind::ALL.into_iter().filter(|kind| *kind != ObjectKind::Key) {
            store
                .list(kind, &mut |name, _| {
                    Err(StoreError::BadName(BadName {
                        text: name.to_string(),
                        reason: "it belongs to a repository without config",
                    }))
                })
                .map_err(|_| already())?;
        }
        let mut leftovers = Vec::new();
        store.list(ObjectKind::Key, &mut |name, _| {
            leftovers.push(name);
            Ok(())
        })?;
        leftovers.iter().try_for_each(|name| store.delete(name))?;

        let randomness = &*surroundings.randomness;
        let master = MasterSecret::generate(randomness)?;
        let id = RepositoryId::from_bytes(surroundings.draw()?);
        let config = RepositoryConfig::new(id, (surroundings.now_ms)(), request.cipher, fingerprints);
        let slot = new_slot(&config, request, &surroundings);
        let slot_id = key::add(&*store, &slot, &master, &config.encode(), randomness)?;
        let name = ObjectName::config();
        let keyring = master.keyring();
        let sealed = key::seal_object(
            &keyring,
            Purpose::ManifestSealing,
            config.cipher,
            &name,
            &config.encode(),
            randomness,
        )?;
        if store.put(&name, &sealed)? == Put::AlreadyExists {
            store.delete(&slot_id.object())?;
            return Err(already());
        }
        if !exists(&*store, &slot_id.object())? {
            // Somebody who made a repository at the same moment took our slot for a leftover, and came second.
            key::add(&*store, &slot, &master, &config.encode(), randomness)?;
        }
        Self::with_master(store, master, config, surroundings)
    }

    /// Opens the repository on a store with what opens one of its key slots.
    pub fn open(store: Arc<dyn Store>, credential: Credential<'_>, surroundings: Surroundings) -> Result<Opened> {
        Self::open_by(store, credential, SlotChoice::Any, surroundings)
    }

    /// The same with the slots that `choice` says.
    pub fn open_by(
        store: Arc<dyn Store>,
        credential: Credential<'_>,
        choice: SlotChoice,
        surroundings: Surroundings,
    ) -> Result<Opened> {
        let unlocked = match key::unlock_chosen(&*store, credential, choice) {
            Err(key::KeyError::NoSlots { store: name }) if !exists(&*store, &ObjectName::config())? => {
                return Err(Error::NotARepository { store: name });
            }
            other => other?,
        };
        let slot = unlocked.slot.id;
        let mut warnings: Vec<Error> = unlocked.damaged.into_iter().map(|(_, error)| error.into()).collect();
        let config = match read_config(&*store, &unlocked.master) {
            Ok(config) => config,
            Err(error)
                if error.is_about_one_object() || matches!(&error, Error::Store(StoreError::NotFound { .. })) =>
            {
                warnings.push(error);
                RepositoryConfig::decode(&unlocked.config)?
            }
            Err(error) => return Err(error),
        };
        let repository = Self::with_master(store, unlocked.master, config, surroundings)?;
        Ok(Opened {
            repository,
            warnings,
            slot,
        })
    }

    /// Opens the repository on a store with its master secret, from a paper key; needs no key slot.
    pub fn open_with_secret(store: Arc<dyn Store>, master: MasterSecret, surroundings: Surroundings) -> Result<Self> {
        let config = match read_config(&*store, &master) {
            Err(Error::Store(StoreError::NotFound { .. })) => {
                return Err(Error::NotARepository {
                    store: store.describe(),
                });
            }
            other => other?,
        };
        Self::with_master(store, master, config, surroundings)
    }

    fn with_master(
        store: Arc<dyn Store>,
        master: MasterSecret,
        config: RepositoryConfig,
        surroundings: Surroundings,
    ) -> Result<Self> {
        let keyring = config.keyring(&master);
        Self::with_vault(Vault {
            store,
            keyring,
            cipher: config.cipher,
            master,
            config,
            surroundings,
        })
    }

    /// What the repository is.
    pub fn config(&self) -> &RepositoryConfig {
        &self.vault.config
    }

    /// Whether the two cut and name bytes alike.
    pub fn recognises_like(&self, other: &Self) -> bool {
        self.vault.keyring.fingerprints() == other.vault.keyring.fingerprints()
    }

    /// The master secret, for a paper key.
    pub fn master(&self) -> &MasterSecret {
        &self.vault.master
    }

    /// Adds a key slot.
    pub fn add_key(&self, request: &InitRequest<'_>) -> Result<SlotId> {
        let vault = &self.vault;
        let slot = new_slot(&vault.config, request, &vault.surroundings);
        let config = vault.config.encode();
        Ok(key::add(
            &*vault.store,
            &slot,
            &vault.master,
            &config,
            &*vault.surroundings.randomness,
        )?)
    }

    /// Puts the configuration back if it is missing, or damaged; true when it was.
    pub(crate) fn mend_config(&self) -> Result<bool> {
        let name = ObjectName::config();
        match read_config(&*self.vault.store, &self.vault.master) {
            Ok(config) if config == self.vault.config => return Ok(false),
            Err(Error::Store(StoreError::NotFound { .. })) => {}
            Ok(_) => self.vault.store.delete(&name)?,
            Err(error) if error.is_about_one_object() => self.vault.store.delete(&name)?,
            Err(error) => return Err(error),
        }
        self.vault.put_sealed(&name, &self.vault.config.encode())?;
        Ok(true)
    }
}

fn new_slot<'a>(config: &RepositoryConfig, request: &InitRequest<'a>, surroundings: &Surroundings) -> NewSlot<'a> {
    NewSlot {
        credential: request.credential,
        parameters: request.parameters,
        label: request.label,
        created_unix_seconds: u64::try_from((surroundings.now_ms)() / 1000).unwrap_or_default(),
        cipher: config.cipher,
    }
}

fn exists(store: &dyn Store, name: &ObjectName) -> Result<bool> {
    match store.length(name) {
        Ok(_) => Ok(true),
        Err(StoreError::NotFound { .. }) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

fn read_config(store: &dyn Store, master: &MasterSecret) -> Result<RepositoryConfig> {
    let name = ObjectName::config();
    let sealed = store.get(&name, CONFIG_OBJECT_BYTES_MAX)?;
    RepositoryConfig::decode(&key::open_object(
        &master.keyring(),
        Purpose::ManifestSealing,
        &name,
        &sealed,
    )?)
}
