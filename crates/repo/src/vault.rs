//! The store and its keys, which every part of the repository uses.

use std::collections::HashSet;
use std::sync::Arc;

use crate::environment::Environment;
use crate::error::{Error, Result};
use crate::format::config::RepositoryConfig;
use crate::format::fingerprint::FingerprintKeys;
use crate::format::index::{SegmentKeys, SegmentReader, merge_segments};
use crate::format::pack::{Directory, PackKey, read_directory};
use crate::id::{PackId, SegmentId};
use crate::key::{Cipher, Keyring, MasterSecret, Purpose, open_object, seal_object};
use crate::store::{ObjectKind, ObjectName, Put, Store, StoreError};

pub(crate) fn exists(vault: &Vault, name: &ObjectName) -> Result<bool> {
    match vault.store.length(name) {
        Ok(_) => Ok(true),
        Err(StoreError::NotFound { .. }) => Ok(false),
        Err(error) => Err(Error::Store(error)),
    }
}

/// The store and the keys for it, used by every part of the repository.
pub(crate) struct Vault {
    pub(crate) store: Arc<dyn Store>,
    pub(crate) keyring: Keyring,
    pub(crate) cipher: Cipher,
    pub(crate) master: MasterSecret,
    pub(crate) config: RepositoryConfig,
    pub(crate) environment: Environment,
}

impl Vault {
    /// Puts a small object, sealed.
    pub(crate) fn put_sealed(&self, name: &ObjectName, plaintext: &[u8]) -> Result<Put> {
        let randomness = &*self.environment.randomness;
        let sealed = seal_object(
            &self.keyring,
            purpose_of(name.kind()),
            self.cipher,
            name,
            plaintext,
            randomness,
        )?;
        Ok(self.store.put(name, &sealed)?)
    }

    /// Reads a small object and decrypts it.
    pub(crate) fn get_sealed(&self, name: &ObjectName, length_max: u64) -> Result<Vec<u8>> {
        let sealed = self.store.get(name, length_max)?;
        Ok(open_object(&self.keyring, purpose_of(name.kind()), name, &sealed)?)
    }

    /// The names of all objects of a kind.
    pub(crate) fn names(&self, kind: ObjectKind) -> Result<Vec<ObjectName>> {
        let mut names = Vec::new();
        self.store.list(kind, &mut |name, _| {
            names.push(name);
            Ok(())
        })?;
        names.sort_unstable();
        Ok(names)
    }

    /// The ids in the object names of a kind; names without an id are skipped.
    pub(crate) fn identities<T: std::str::FromStr>(&self, kind: ObjectKind) -> Result<Vec<T>> {
        Ok(self
            .names(kind)?
            .iter()
            .filter_map(|name| name.name().parse().ok())
            .collect())
    }

    pub(crate) fn fingerprint_keys(&self) -> FingerprintKeys {
        FingerprintKeys::new(&self.keyring)
    }

    pub(crate) fn segment_keys(&self) -> SegmentKeys {
        SegmentKeys {
            cipher: self.cipher,
            keyring: self.keyring.clone(),
        }
    }

    /// All packs that exist.
    pub(crate) fn pack_ids(&self) -> Result<HashSet<PackId>> {
        Ok(self.identities(ObjectKind::Pack)?.into_iter().collect())
    }

    /// The directory of a pack; `None` if it is unreadable, or the pack does not exist.
    pub(crate) fn directory(&self, pack: PackId) -> Result<Option<Directory>> {
        let key = PackKey::new(self.cipher, self.keyring.key(Purpose::PackSealing), pack);
        match read_directory(&*self.store, pack, key) {
            Ok(reader) => Ok(Some(reader.directory)),
            Err(Error::Store(StoreError::NotFound { .. })) => Ok(None),
            Err(error) if error.is_about_one_object() || error.is_unreadable() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Writes the entries of `segments` about the packs in `existing` as one segment.
    pub(crate) fn merge(&self, segments: &[SegmentReader], existing: &HashSet<PackId>) -> Result<SegmentId> {
        let merged = SegmentId::from_bytes(self.environment.draw()?);
        let directory_of = |pack| self.directory(pack);
        merge_segments(
            &*self.store,
            &self.segment_keys(),
            segments,
            existing,
            merged,
            &directory_of,
        )
    }

    /// All readable segments of the index; and the errors of the others.
    pub(crate) fn segments(&self) -> Result<(Vec<SegmentReader>, Vec<Error>)> {
        let keys = self.segment_keys();
        let (mut segments, mut errors) = (Vec::new(), Vec::new());
        for id in self.identities::<SegmentId>(ObjectKind::Index)? {
            match SegmentReader::open(&*self.store, &keys, id) {
                Ok(segment) => segments.push(segment),
                // It was merged into another segment meanwhile.
                Err(Error::Store(StoreError::NotFound { .. })) => {}
                Err(error) if error.is_about_one_object() => errors.push(error),
                Err(error) => return Err(error),
            }
        }
        Ok((segments, errors))
    }
}

/// The purpose of the key that seals small objects of a kind.
pub(crate) fn purpose_of(kind: ObjectKind) -> Purpose {
    match kind {
        ObjectKind::Snapshot | ObjectKind::Config => Purpose::ManifestSealing,
        _ => Purpose::MarkerSealing,
    }
}
