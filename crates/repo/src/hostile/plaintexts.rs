//! Extracts the plaintexts of a repository as seeds, and seals hostile objects.

use super::keyring;
use crate::check::scrub::record::is_read_record;
use crate::error::Result;
use crate::format::config::RepositoryConfig;
use crate::format::index::segment::forged;
use crate::format::manifest::encode_revoked;
use crate::format::pack::PackKey;
use crate::key;
use crate::key::{Cipher, PaperKey, Purpose, seal_object};
use crate::repository::Repository;
use crate::store::{ObjectKind, ObjectName};
use crate::vault::Vault;

/// The input of a parser, from an object.
#[derive(Debug, Clone)]
pub struct Plaintext {
    /// The parser, of [`PARSERS`](super::PARSERS).
    pub parser: &'static str,
    /// Its bytes.
    pub bytes: Vec<u8>,
}

/// The complete input of an object's parser; `None` if no parser handles sealed data of this kind.
pub fn plaintext(repository: &Repository, name: &ObjectName) -> Result<Option<Plaintext>> {
    let vault = &repository.vault;
    let text = name.name();
    let parser = match name.kind() {
        ObjectKind::Config => "config",
        ObjectKind::Key => return Ok(None),
        ObjectKind::Pack => {
            let Ok(pack) = text.parse() else { return Ok(None) };
            let bytes = super::pack::plaintext(&*vault.store, pack, || pack_key(vault, pack))?;
            return Ok(Some(Plaintext { parser: "pack", bytes }));
        }
        ObjectKind::Index => {
            let Ok(segment) = text.parse() else { return Ok(None) };
            let bytes = forged::plaintext(&*vault.store, &vault.segment_keys(), segment)?;
            let parser = "index_segment";
            return Ok(Some(Plaintext { parser, bytes }));
        }
        ObjectKind::Snapshot => "manifest",
        ObjectKind::Forgotten => "forgotten",
        ObjectKind::Protected if !text.contains('.') => return Ok(None),
        ObjectKind::Protected | ObjectKind::Writer => "writer",
        ObjectKind::Condemned if text.contains('.') => "waits",
        ObjectKind::Condemned => "condemned",
        ObjectKind::Relocation => "relocation",
        ObjectKind::Scrub if is_read_record(name) => "scrub_record",
        ObjectKind::Scrub => "damage_record",
    };
    let bytes = vault.get_sealed(name, u64::MAX)?;
    Ok(Some(Plaintext { parser, bytes }).filter(|plaintext| plaintext.bytes != encode_revoked()))
}

fn pack_key(vault: &Vault, pack: crate::id::PackId) -> PackKey {
    PackKey::new(vault.cipher, vault.keyring.key(Purpose::PackSealing), pack)
}

/// The object `name` with another plaintext, sealed with the repository's keys; `None` if it cannot be sealed.
///
/// Only someone with the keys can replace an object by such a forgery.
pub fn reseal(repository: &Repository, name: &ObjectName, plaintext: &[u8]) -> Result<Option<Vec<u8>>> {
    let vault = &repository.vault;
    let purpose = match name.kind() {
        ObjectKind::Key => return Ok(None),
        ObjectKind::Pack => {
            let forge = |pack| super::pack::forge(&pack_key(vault, pack), pack, plaintext);
            return Ok(name.name().parse().ok().and_then(forge));
        }
        ObjectKind::Index => {
            let forge = |segment| forged::forge(&vault.segment_keys(), segment, plaintext);
            return Ok(name.name().parse().ok().and_then(forge));
        }
        ObjectKind::Config | ObjectKind::Snapshot => Purpose::ManifestSealing,
        _ => Purpose::MarkerSealing,
    };
    let randomness = &*vault.environment.randomness;
    let sealed = seal_object(&vault.keyring, purpose, vault.cipher, name, plaintext, randomness)?;
    Ok(Some(sealed))
}

/// The inputs of every parser in an intact repository: valid bytes.
pub fn plaintexts(repository: &Repository) -> Result<Vec<Plaintext>> {
    let vault = &repository.vault;
    let mut found = Vec::new();
    let mut add = |parser: &'static str, bytes: Vec<u8>| found.push(Plaintext { parser, bytes });
    for kind in ObjectKind::ALL {
        for name in vault.names(kind)? {
            add("object_name", name.to_string().into_bytes());
            match plaintext(repository, &name)? {
                _ if kind == ObjectKind::Key => {
                    // Without the hash at its end.
                    let mut slot = vault.store.get(&name, key::SLOT_BYTES_MAX)?;
                    slot.truncate(slot.len().saturating_sub(32));
                    add("key_slot", slot);
                }
                Some(Plaintext { parser: "pack", .. }) => {
                    let pack = name.name().parse().expect("the name of a pack was read");
                    for (parser, bytes) in super::pack::parts(&*vault.store, pack, || pack_key(vault, pack))? {
                        add(parser, bytes);
                    }
                }
                Some(Plaintext { parser, bytes }) => add(parser, bytes),
                None => {}
            }
        }
    }
    for manifest in repository.snapshots()?.0 {
        for disk in &manifest.disks {
            for (parser, bytes) in super::map::parts(&repository.packs, disk)? {
                add(parser, bytes);
            }
        }
    }
    add("paper_key", PaperKey::encode(&vault.master).text().as_bytes().to_vec());
    let (name, randomness) = (ObjectName::config(), &*vault.environment.randomness);
    let of_another = Some(vault.keyring.fingerprints());
    for (cipher, fingerprints) in [(Cipher::Aes256Gcm, None), (Cipher::ChaCha20Poly1305, of_another)] {
        let config = RepositoryConfig::new(vault.config.id, 0, cipher, fingerprints).encode();
        let sealed = seal_object(&keyring(), Purpose::MarkerSealing, cipher, &name, &config, randomness)?;
        add("sealed_object", sealed);
        add("config", config.to_vec());
    }
    Ok(found)
}
