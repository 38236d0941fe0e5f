//! Creates and opens a repository.

use std::sync::Arc;

use crate::environment::Environment;
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

/// Options of a new repository.
#[derive(Debug, Clone)]
pub struct InitRequest<'a> {
    /// The credential of the first key slot.
    pub credential: Credential<'a>,
    /// The label of that slot.
    pub label: &'a str,
    /// The cost of guessing a password.
    pub parameters: KdfParameters,
    /// The cipher.
    pub cipher: Cipher,
}

/// An opened repository, and problems found while opening it.
pub struct OpenedRepository {
    /// The repository.
    pub repository: Repository,
    /// Damage that did not prevent opening.
    pub warnings: Vec<Error>,
    /// The key slot that opened.
    pub slot: SlotId,
}

fn already_a_repository(store: &dyn Store) -> Error {
    Error::AlreadyARepository {
        store: store.describe(),
    }
}

impl Repository {
    /// Creates a repository on an empty store.
    ///
    /// The key slot is put first and the configuration last: only the configuration makes it a repository, and if two
    /// processes create one concurrently, one wins. Leftovers of an interrupted attempt are removed.
    pub fn init(store: Arc<dyn Store>, request: &InitRequest<'_>, environment: Environment) -> Result<Self> {
        Self::init_with(store, request, None, environment)
    }

    /// Creates a repository with the same fingerprint keys as `other`, so that copies between the two are deduplicated.
    /// It has its own secret: neither can open the other.
    pub fn init_like(
        store: Arc<dyn Store>,
        request: &InitRequest<'_>,
        other: &Self,
        environment: Environment,
    ) -> Result<Self> {
        Self::init_with(store, request, Some(other.vault.keyring.fingerprints()), environment)
    }

    fn init_with(
        store: Arc<dyn Store>,
        request: &InitRequest<'_>,
        fingerprints: Option<FingerprintSecret>,
        environment: Environment,
    ) -> Result<Self> {
        Self::check_new(&*store)?;
        let mut leftovers = Vec::new();
        store.list(ObjectKind::Key, &mut |name, _| {
            leftovers.push(name);
            Ok(())
        })?;
        leftovers.iter().try_for_each(|name| store.delete(name))?;

        let randomness = &*environment.randomness;
        let master = MasterSecret::generate(randomness)?;
        let id = RepositoryId::from_bytes(environment.draw()?);
        let config = RepositoryConfig::new(id, (environment.now_ms)(), request.cipher, fingerprints);
        let slot = new_slot(&config, request, &environment);
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
            return Err(already_a_repository(&*store));
        }
        if !exists(&*store, &slot_id.object())? {
            // Another process that created a repository at the same time removed this slot as a leftover, but lost.
            key::add(&*store, &slot, &master, &config.encode(), randomness)?;
        }
        Self::with_master(store, master, config, environment)
    }

    /// Checks that a store contains no repository, and no part of one.
    pub fn check_new(store: &dyn Store) -> Result<()> {
        if exists(store, &ObjectName::config())? {
            return Err(already_a_repository(store));
        }
        for kind in ObjectKind::ALL.into_iter().filter(|kind| *kind != ObjectKind::Key) {
            store
                .list(kind, &mut |name, _| {
                    Err(StoreError::BadName(BadName {
                        text: name.to_string(),
                        reason: "it belongs to a repository without config",
                    }))
                })
                .map_err(|_| already_a_repository(store))?;
        }
        Ok(())
    }

    /// Opens the repository in a store with the credential of one of its key slots.
    pub fn open(
        store: Arc<dyn Store>,
        credential: Credential<'_>,
        environment: Environment,
    ) -> Result<OpenedRepository> {
        Self::open_by(store, credential, SlotChoice::Any, environment)
    }

    /// The same with the slots that `choice` selects.
    pub fn open_by(
        store: Arc<dyn Store>,
        credential: Credential<'_>,
        choice: SlotChoice,
        environment: Environment,
    ) -> Result<OpenedRepository> {
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
        let repository = Self::with_master(store, unlocked.master, config, environment)?;
        Ok(OpenedRepository {
            repository,
            warnings,
            slot,
        })
    }

    /// Opens the repository in a store with its master secret, from a paper key; needs no key slot.
    pub fn open_with_secret(store: Arc<dyn Store>, master: MasterSecret, environment: Environment) -> Result<Self> {
        let config = match read_config(&*store, &master) {
            Err(Error::Store(StoreError::NotFound { .. })) => {
                return Err(Error::NotARepository {
                    store: store.describe(),
                });
            }
            other => other?,
        };
        Self::with_master(store, master, config, environment)
    }

    fn with_master(
        store: Arc<dyn Store>,
        master: MasterSecret,
        config: RepositoryConfig,
        environment: Environment,
    ) -> Result<Self> {
        let keyring = config.keyring(&master);
        Self::with_vault(Vault {
            store,
            keyring,
            cipher: config.cipher,
            master,
            config,
            environment,
        })
    }

    /// The configuration of the repository.
    pub fn config(&self) -> &RepositoryConfig {
        &self.vault.config
    }

    /// Whether both repositories have the same fingerprint keys.
    pub fn has_same_fingerprints(&self, other: &Self) -> bool {
        self.vault.keyring.fingerprints() == other.vault.keyring.fingerprints()
    }

    /// The master secret, for a paper key.
    pub fn master(&self) -> &MasterSecret {
        &self.vault.master
    }

    /// Adds a key slot.
    pub fn add_key(&self, request: &InitRequest<'_>) -> Result<SlotId> {
        let vault = &self.vault;
        let slot = new_slot(&vault.config, request, &vault.environment);
        let config = vault.config.encode();
        Ok(key::add(
            &*vault.store,
            &slot,
            &vault.master,
            &config,
            &*vault.environment.randomness,
        )?)
    }

    /// Restores the configuration if it is missing or damaged; returns whether it was.
    pub(crate) fn repair_config(&self) -> Result<bool> {
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

fn new_slot<'a>(config: &RepositoryConfig, request: &InitRequest<'a>, environment: &Environment) -> NewSlot<'a> {
    NewSlot {
        credential: request.credential,
        parameters: request.parameters,
        label: request.label,
        created_unix_seconds: u64::try_from((environment.now_ms)() / 1000).unwrap_or_default(),
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
