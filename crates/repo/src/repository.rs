//! A repository, opened.

pub(crate) mod chunk_index;
pub(crate) mod damage_records;
pub(crate) mod init;
pub(crate) mod packs;
pub(crate) mod pending_deletes;
pub(crate) mod relocations;

use std::collections::HashSet;
use std::sync::Arc;

use crate::environment::Surroundings;
use crate::error::{Error, Result};
use crate::format::config::RepositoryConfig;
use crate::format::fingerprint::FingerprintKeys;
use crate::format::index::{SegmentKeys, SegmentReader, merge_segments};
use crate::format::manifest::{MANIFEST_BYTES_MAX, Manifest, SnapshotObject, decode_snapshot, snapshot_name};
use crate::format::pack::{Directory, PackKey, read_directory};
use crate::id::{PackId, SegmentId, SnapshotId};
use crate::key::{Cipher, Keyring, MasterSecret, Purpose, open_object, seal_object};
use crate::repository::packs::Packs;
use crate::store::{ObjectKind, ObjectName, Put, Store, StoreError};

/// The store and the keys to it: what every part of the repository works with.
pub(crate) struct Vault {
    pub(crate) store: Arc<dyn Store>,
    pub(crate) keyring: Keyring,
    pub(crate) cipher: Cipher,
    pub(crate) master: MasterSecret,
    pub(crate) config: RepositoryConfig,
    pub(crate) surroundings: Surroundings,
}

impl Vault {
    /// Puts a small object, sealed.
    pub(crate) fn put_sealed(&self, name: &ObjectName, plaintext: &[u8]) -> Result<Put> {
        let randomness = &*self.surroundings.randomness;
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

    /// Gets a small object and opens it.
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

    /// The identities of all objects of a kind that are named by one; other names are none of ours.
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

    /// The directory of a pack; none where it cannot be read, or the pack does not exist.
    pub(crate) fn directory(&self, pack: PackId) -> Result<Option<Directory>> {
        let key = PackKey::new(self.cipher, self.keyring.key(Purpose::PackSealing), pack);
        match read_directory(&*self.store, pack, key) {
            Ok(reader) => Ok(Some(reader.directory)),
            Err(Error::Store(StoreError::NotFound { .. })) => Ok(None),
            Err(error) if error.is_about_one_object() || error.is_unreadable() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Writes what `segments` say of the packs in `living` as one segment.
    pub(crate) fn merge(&self, segments: &[SegmentReader], living: &HashSet<PackId>) -> Result<SegmentId> {
        let merged = SegmentId::from_bytes(self.surroundings.draw()?);
        let directory_of = |pack| self.directory(pack);
        merge_segments(
            &*self.store,
            &self.segment_keys(),
            segments,
            living,
            merged,
            &directory_of,
        )
    }

    /// All segments of the index that can be read; and the errors of those that cannot.
    pub(crate) fn segments(&self) -> Result<(Vec<SegmentReader>, Vec<Error>)> {
        let keys = self.segment_keys();
        let (mut segments, mut errors) = (Vec::new(), Vec::new());
        for id in self.identities::<SegmentId>(ObjectKind::Index)? {
            match SegmentReader::open(&*self.store, &keys, id) {
                Ok(segment) => segments.push(segment),
                // It was merged into another while we looked.
                Err(Error::Store(StoreError::NotFound { .. })) => {}
                Err(error) if error.is_about_one_object() => errors.push(error),
                Err(error) => return Err(error),
            }
        }
        Ok((segments, errors))
    }
}

/// The key that seals small objects of a kind.
fn purpose_of(kind: ObjectKind) -> Purpose {
    match kind {
        ObjectKind::Snapshot | ObjectKind::Config => Purpose::ManifestSealing,
        _ => Purpose::MarkerSealing,
    }
}

/// A repository, opened.
pub struct Repository {
    pub(crate) vault: Vault,
    pub(crate) packs: Arc<Packs>,
}

impl Repository {
    pub(crate) fn with_vault(vault: Vault) -> Result<Self> {
        let packs = Arc::new(Packs::new(
            Arc::clone(&vault.store),
            vault.cipher,
            vault.keyring.clone(),
        ));
        let repository = Self { vault, packs };
        repository.refresh()?;
        Ok(repository)
    }

    /// Learns what others changed since the repository was opened.
    pub(crate) fn refresh(&self) -> Result<()> {
        self.packs.refresh().map(|_| ())
    }

    /// What time it is by the clock of this host, in milliseconds since 1970-01-01 UTC.
    pub fn now_ms(&self) -> i64 {
        (self.vault.surroundings.now_ms)()
    }

    /// The store, as it describes itself.
    pub fn describe(&self) -> String {
        self.vault.store.describe()
    }

    /// The manifest of a snapshot.
    pub fn snapshot(&self, id: SnapshotId) -> Result<Manifest> {
        match self.read_snapshot(id)? {
            Some(manifest) => Ok(manifest),
            None => Err(Error::NoSnapshot { id }),
        }
    }

    fn read_snapshot(&self, id: SnapshotId) -> Result<Option<Manifest>> {
        let name = snapshot_name(id);
        let bytes = match self.vault.get_sealed(&name, MANIFEST_BYTES_MAX) {
            Err(Error::Store(StoreError::NotFound { .. })) => return Ok(None),
            other => other?,
        };
        match decode_snapshot(&bytes, id)? {
            SnapshotObject::Committed(manifest) => Ok(Some(*manifest)),
            SnapshotObject::Revoked => Ok(None),
        }
    }

    /// The ids under which snapshots are stored, and those of which it is recorded that they were removed. Nothing of them is read.
    pub fn snapshot_ids(&self) -> Result<(HashSet<SnapshotId>, HashSet<SnapshotId>)> {
        // A record of a removal comes before the snapshot goes.
        let there = self.vault.identities(ObjectKind::Snapshot)?.into_iter().collect();
        let removed = self.vault.identities(ObjectKind::Forgotten)?.into_iter().collect();
        Ok((there, removed))
    }

    /// All snapshots, oldest first; and the errors of those that cannot be read.
    pub fn snapshots(&self) -> Result<(Vec<Manifest>, Vec<Error>)> {
        self.snapshots_except(&HashSet::new())
    }

    /// The same without those that are `known`, which are not read.
    pub fn snapshots_except(&self, known: &HashSet<SnapshotId>) -> Result<(Vec<Manifest>, Vec<Error>)> {
        let mut left_out: HashSet<SnapshotId> = self.vault.identities(ObjectKind::Forgotten)?.into_iter().collect();
        left_out.extend(known);
        self.standing_snapshots_except(&left_out)
    }

    /// Those whose objects exist, also while they are being forgotten.
    pub(crate) fn standing_snapshots_except(
        &self,
        left_out: &HashSet<SnapshotId>,
    ) -> Result<(Vec<Manifest>, Vec<Error>)> {
        let (mut manifests, mut errors) = (Vec::new(), Vec::new());
        for id in self.vault.identities::<SnapshotId>(ObjectKind::Snapshot)? {
            if left_out.contains(&id) {
                continue;
            }
            match self.read_snapshot(id) {
                Ok(manifest) => manifests.extend(manifest),
                Err(error) if error.is_about_one_object() || error.is_unreadable() => errors.push(error),
                Err(error) => return Err(error),
            }
        }
        manifests.sort_by_key(|manifest| (manifest.time_ms, manifest.id));
        Ok((manifests, errors))
    }
}
