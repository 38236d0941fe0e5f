//! The key slots of a store: add, open, list, replace and remove.
//!
//! A slot is an immutable object; a new password is a new slot. The new one is durable, and has been opened once,
//! before an old one is removed.
//!
//! Two hosts may each remove "the other" slot at the same moment. To keep at least one slot, a removal first puts a
//! marker, `keys/<slot>.<attempt>`, then lists the slots, and deletes only if there is a slot without a marker besides
//! its own. The later of two markers sees the earlier one; the slot is deleted before its markers, and every slot that
//! is relied on is read after the markers. A marker that a crash leaves only makes later removals more careful.

use std::collections::BTreeSet;

use super::random::{Randomness, random};
use super::slot::{SLOT_BYTES_MAX, Slot, SlotContents, encode};
use super::{Cipher, Credential, CredentialKind, KdfParameters, KeyError, MasterSecret, Result};
use crate::key::slot_info::{SlotId, SlotInfo};
use crate::store::{ObjectKind, ObjectName, Put, Store, StoreError};

/// Maximum number of slots in a repository.
pub const SLOT_COUNT_MAX: usize = 64;
/// Maximum number of objects that are examined: slots, and markers and damaged objects.
const OBJECT_COUNT_MAX: usize = 4 * SLOT_COUNT_MAX;
/// Limit of the total cost of tried slots, in the unit of [`KdfParameters::cost`]: that of 64 slots with today's
/// default cost. Anyone with write access to the store can add slots, and each of them costs time.
const COST_MAX: u64 = 64 * 32 * 1024 * 4;

/// A slot to create.
#[derive(Debug, Clone)]
pub struct NewSlot<'a> {
    /// The credential that opens it.
    pub credential: Credential<'a>,
    /// The cost of guessing a password; ignored for other credentials.
    pub parameters: KdfParameters,
    /// Its label: the owner or the place of the credential.
    pub label: &'a str,
    /// The time, in seconds since 1970.
    pub created_unix_seconds: u64,
    /// The cipher.
    pub cipher: Cipher,
}

/// An opened slot.
#[derive(Debug)]
pub struct Unlocked {
    /// The master secret of the repository.
    pub master: MasterSecret,
    /// The configuration of the repository when the slot was created.
    pub config: Vec<u8>,
    /// The slot that opened.
    pub slot: SlotInfo,
    /// Slots that could not be tried, and why; the caller should warn of them.
    pub damaged: Vec<(ObjectName, KeyError)>,
}

/// All slots of a store.
#[derive(Debug)]
pub struct SlotListing {
    /// Intact slots, oldest first.
    pub slots: Vec<SlotInfo>,
    /// Those of the slots whose removal has begun but not ended.
    pub being_removed: BTreeSet<SlotId>,
    /// Objects that are not slots, or are damaged, and why.
    pub damaged: Vec<(ObjectName, KeyError)>,
}

/// Which slots to try.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SlotChoice {
    /// All, cheapest first.
    #[default]
    Any,
    /// This one first, since it opened the last time. Then additional slots of an attacker cost no time.
    First(SlotId),
    /// Only this one.
    Only(SlotId),
}

/// How to treat the last slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Removal {
    /// It cannot be removed.
    KeepLast,
    /// It can be removed: afterwards only a paper key opens the repository.
    AllowLast,
}

/// Adds a slot with `master` and `config`, and opens it once as a check.
pub fn add(
    store: &dyn Store,
    new: &NewSlot<'_>,
    master: &MasterSecret,
    config: &[u8],
    randomness: &dyn Randomness,
) -> Result<SlotId> {
    if LoadedSlots::new(store)?.slots.len() >= SLOT_COUNT_MAX {
        return Err(KeyError::TooManySlots {
            store: store.describe(),
            count_max: SLOT_COUNT_MAX,
        });
    }
    let contents = SlotContents {
        master: master.clone(),
        config: config.to_vec(),
    };
    let info = SlotInfo {
        id: SlotId::generate(randomness)?,
        kind: new.credential.kind(),
        label: new.label.to_owned(),
        created_unix_seconds: new.created_unix_seconds,
        parameters: (new.credential.kind() == CredentialKind::Password).then_some(new.parameters),
    };
    let id = info.id;
    let bytes = encode(&info, new.cipher, new.credential, &contents, randomness)?;
    if store.put(&id.object(), &bytes)? == Put::AlreadyExists {
        // A random id that exists already shows that the source is not random.
        return Err(KeyError::NoRandomness);
    }
    let opened = Slot::parse(id, &store.get(&id.object(), SLOT_BYTES_MAX)?).and_then(|slot| slot.open(new.credential));
    match opened {
        Ok(Some(opened)) if opened.master == *master && opened.config == config => Ok(id),
        _ => {
            store.delete(&id.object())?;
            Err(KeyError::SlotUnreadable { id })
        }
    }
}

/// Opens a slot with `credential`: the first matching slot that opens, in ascending order of cost.
///
/// Slots of other kinds are not tried. In particular an open slot, which anyone with write access to the store could
/// have added, never replaces a password.
pub fn unlock(store: &dyn Store, credential: Credential<'_>) -> Result<Unlocked> {
    unlock_chosen(store, credential, SlotChoice::Any)
}

/// The same for the slots that `choice` selects.
pub fn unlock_chosen(store: &dyn Store, credential: Credential<'_>, choice: SlotChoice) -> Result<Unlocked> {
    match choice {
        SlotChoice::Any => unlock_any(store, credential),
        SlotChoice::First(id) => match unlock_one(store, id, credential) {
            Ok(unlocked) => Ok(unlocked),
            // It may be gone, or have another password: then it is tried like all others.
            Err(_) => unlock_any(store, credential),
        },
        SlotChoice::Only(id) => unlock_one(store, id, credential),
    }
}

/// Opens one slot. Damage of other slots is only reported.
fn unlock_one(store: &dyn Store, id: SlotId, credential: Credential<'_>) -> Result<Unlocked> {
    let slot = load(store, &id.object()).map_err(|error| match error {
        KeyError::Store(StoreError::NotFound { .. }) => KeyError::NoSuchSlot { id },
        other => other,
    })?;
    if slot.info.kind != credential.kind() {
        return Err(KeyError::NoSlotFor {
            store: store.describe(),
            kind: credential.kind(),
            present: vec![slot.info],
        });
    }
    match slot.open(credential)? {
        Some(SlotContents { master, config }) => Ok(Unlocked {
            master,
            config,
            slot: slot.info,
            // The slot opened, so problems of others only deserve a warning; if they cannot be listed, there is
            // none.
            damaged: LoadedSlots::new(store).map_or_else(|_| Vec::new(), |loaded| loaded.damaged),
        }),
        None => Err(KeyError::WrongCredential {
            store: store.describe(),
            kind: credential.kind(),
            tried: vec![slot.info],
            damaged: Vec::new(),
        }),
    }
}

fn unlock_any(store: &dyn Store, credential: Credential<'_>) -> Result<Unlocked> {
    let LoadedSlots {
        mut slots,
        mut damaged,
        is_cut_off,
        ..
    } = LoadedSlots::load_bounded(store)?;
    if slots.is_empty() && damaged.is_empty() {
        return Err(KeyError::NoSlots {
            store: store.describe(),
        });
    }
    slots.sort_by_key(|slot| slot.info.parameters.map(KdfParameters::cost));
    let (candidates, others): (Vec<_>, Vec<_>) =
        slots.into_iter().partition(|slot| slot.info.kind == credential.kind());
    let mut tried = Vec::new();
    let (mut spent, mut untried_count) = (0_u64, 0);
    for slot in candidates {
        if is_enough(tried.len(), spent) {
            untried_count += 1;
            continue;
        }
        spent = spent.saturating_add(slot.info.parameters.map_or(0, KdfParameters::cost));
        match slot.open(credential) {
            Ok(Some(SlotContents { master, config })) => {
                return Ok(Unlocked {
                    master,
                    config,
                    slot: slot.info,
                    damaged,
                });
            }
            Ok(None) => tried.push(slot.info),
            Err(error) => damaged.push((slot.info.id.object(), error)),
        }
    }
    if untried_count > 0 || is_cut_off {
        return Err(KeyError::SlotsNotTried {
            store: store.describe(),
            kind: credential.kind(),
            tried_count: tried.len(),
        });
    }
    // A slot that could not be read may be the right one.
    if let Some(at) = damaged.iter().position(|(_, error)| is_store_failure(error)) {
        return Err(damaged.swap_remove(at).1);
    }
    if tried.is_empty() && damaged.is_empty() {
        return Err(KeyError::NoSlotFor {
            store: store.describe(),
            kind: credential.kind(),
            present: others.into_iter().map(|slot| slot.info).collect(),
        });
    }
    Err(KeyError::WrongCredential {
        store: store.describe(),
        kind: credential.kind(),
        tried,
        damaged: damaged
            .iter()
            .filter_map(|(name, _)| SlotId::from_object(name))
            .collect(),
    })
}

/// Whether no further slot should be tried.
fn is_enough(tried_count: usize, spent: u64) -> bool {
    tried_count >= SLOT_COUNT_MAX || spent >= COST_MAX
}

/// All slots, without opening any.
pub fn list(store: &dyn Store) -> Result<SlotListing> {
    let loaded = LoadedSlots::new(store)?;
    let mut slots: Vec<_> = loaded.slots.into_iter().map(|slot| slot.info).collect();
    slots.sort_by_key(|slot| (slot.created_unix_seconds, slot.id));
    Ok(SlotListing {
        being_removed: slots
            .iter()
            .map(|slot| slot.id)
            .filter(|id| loaded.being_removed.contains(id))
            .collect(),
        slots,
        damaged: loaded.damaged,
    })
}

/// Replaces the opened slot: a new password, other parameters, another label.
///
/// The old slot is removed when the new one is durable and was opened; after an error the old one, and perhaps both,
/// remain.
pub fn replace(store: &dyn Store, old: &Unlocked, new: &NewSlot<'_>, randomness: &dyn Randomness) -> Result<SlotId> {
    let id = add(store, new, &old.master, &old.config, randomness)?;
    remove(store, old.slot.id, Removal::KeepLast, randomness)?;
    Ok(id)
}

/// Removes a slot, intact or damaged.
///
/// An earlier copy of the store can still be opened with the removed slot.
pub fn remove(store: &dyn Store, id: SlotId, removal: Removal, randomness: &dyn Randomness) -> Result<()> {
    match store.length(&id.object()) {
        Err(StoreError::NotFound { .. }) => return Err(KeyError::NoSuchSlot { id }),
        other => other?,
    };
    if removal == Removal::KeepLast {
        let marker = put_marker(store, id, randomness)?;
        let others = remaining_slot_count(store, id);
        if !matches!(others, Ok(1..)) {
            store.delete(&marker)?;
            others?;
            return Err(KeyError::LastSlot { id });
        }
    }
    store.delete(&id.object())?;
    for (slot, marker) in markers(store)? {
        if slot == id {
            store.delete(&marker)?;
        }
    }
    Ok(())
}

/// Checks that [`remove`] could remove a slot, and that others would remain; changes nothing.
pub fn check_removal(store: &dyn Store, id: SlotId) -> Result<()> {
    match store.length(&id.object()) {
        Err(StoreError::NotFound { .. }) => return Err(KeyError::NoSuchSlot { id }),
        other => other?,
    };
    match remaining_slot_count(store, id)? {
        0 => Err(KeyError::LastSlot { id }),
        _ => Ok(()),
    }
}

/// The number of slots other than `id` that exist and are not about to be removed.
fn remaining_slot_count(store: &dyn Store, id: SlotId) -> Result<usize> {
    let loaded = LoadedSlots::new(store)?;
    let stays = |slot: &&Slot| slot.info.id != id && !loaded.being_removed.contains(&slot.info.id);
    Ok(loaded.slots.iter().filter(stays).count())
}

fn put_marker(store: &dyn Store, id: SlotId, randomness: &dyn Randomness) -> Result<ObjectName> {
    let attempt = u64::from_be_bytes(random(randomness)?);
    let marker = ObjectName::new(ObjectKind::Key, &format!("{id}.{attempt:016x}")).map_err(StoreError::from)?;
    match store.put(&marker, b"")? {
        Put::Created => Ok(marker),
        Put::AlreadyExists => Err(KeyError::NoRandomness),
    }
}

/// The slot of a removal marker.
fn marked_slot(name: &ObjectName) -> Option<SlotId> {
    let (slot, attempt) = name.name().split_once('.')?;
    attempt.parse::<SlotId>().ok()?;
    slot.parse().ok()
}

fn markers(store: &dyn Store) -> Result<Vec<(SlotId, ObjectName)>> {
    let names = names(store)?;
    Ok(names
        .into_iter()
        .filter_map(|name| Some((marked_slot(&name)?, name)))
        .collect())
}

fn names(store: &dyn Store) -> Result<Vec<ObjectName>> {
    let names = some_names(store)?;
    if names.len() > OBJECT_COUNT_MAX {
        return Err(KeyError::TooManySlots {
            store: store.describe(),
            count_max: OBJECT_COUNT_MAX,
        });
    }
    Ok(names)
}

/// The names of all objects; at most one more than the limit.
fn some_names(store: &dyn Store) -> Result<Vec<ObjectName>> {
    let mut names = Vec::new();
    store.list(ObjectKind::Key, &mut |name, _| {
        // One more than the limit shows that there are more.
        if names.len() <= OBJECT_COUNT_MAX {
            names.push(name);
        }
        Ok(())
    })?;
    names.sort();
    Ok(names)
}

/// All objects of the kind `keys`.
struct LoadedSlots {
    slots: Vec<Slot>,
    being_removed: BTreeSet<SlotId>,
    damaged: Vec<(ObjectName, KeyError)>,
    /// Whether there are more objects than the limit, so that some were not examined.
    is_cut_off: bool,
}

impl LoadedSlots {
    fn new(store: &dyn Store) -> Result<Self> {
        Ok(Self::of(store, names(store)?))
    }

    /// Loads at most the limit of objects.
    fn load_bounded(store: &dyn Store) -> Result<Self> {
        let mut names = some_names(store)?;
        let is_cut_off = names.len() > OBJECT_COUNT_MAX;
        names.truncate(OBJECT_COUNT_MAX);
        Ok(Self {
            is_cut_off,
            ..Self::of(store, names)
        })
    }

    fn of(store: &dyn Store, names: Vec<ObjectName>) -> Self {
        let mut loaded = Self {
            slots: Vec::new(),
            being_removed: BTreeSet::new(),
            damaged: Vec::new(),
            is_cut_off: false,
        };
        for name in names {
            if let Some(id) = marked_slot(&name) {
                loaded.being_removed.insert(id);
                continue;
            }
            match load(store, &name) {
                Ok(slot) => loaded.slots.push(slot),
                // Removed since the list was made.
                Err(KeyError::Store(StoreError::NotFound { .. })) => {}
                Err(error) => loaded.damaged.push((name, error)),
            }
        }
        loaded
    }
}

fn load(store: &dyn Store, name: &ObjectName) -> Result<Slot> {
    let id = SlotId::from_object(name).ok_or_else(|| KeyError::Damaged {
        name: name.clone(),
        detail: "its name is not that of a key slot",
    })?;
    Slot::parse(id, &store.get(name, SLOT_BYTES_MAX)?)
}

/// Whether the error is one of the store rather than of the slot.
fn is_store_failure(error: &KeyError) -> bool {
    match error {
        KeyError::Store(error) => !matches!(error, StoreError::TooLarge { .. }),
        KeyError::NoMemory { .. } => true,
        _ => false,
    }
}

#[cfg(test)]
mod tests;
