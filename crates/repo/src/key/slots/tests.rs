use std::sync::Arc;

use super::*;
use crate::key::random::Counting;
use crate::store::{Fault, FaultPlan, FaultSpan, FaultStore, Interleaver, MemoryStore};

const CHEAP: KdfParameters = KdfParameters {
    memory_kib: 8,
    iterations: 1,
    lanes: 1,
};
const ALICE: Credential<'_> = Credential::Password(b"alice");
const BOB: Credential<'_> = Credential::Password(b"bob");
const KEY_FILE: Credential<'_> = Credential::KeyFile(&[9; 40]);
const CONFIG: &[u8] = b"configuration";

fn new(credential: Credential<'_>) -> NewSlot<'_> {
    NewSlot {
        credential,
        parameters: CHEAP,
        label: "label",
        created_unix_seconds: 1,
        cipher: Cipher::default(),
    }
}

fn master() -> MasterSecret {
    MasterSecret::from_bytes([7; 32])
}

fn with(credentials: &[Credential<'_>]) -> (MemoryStore, Vec<SlotId>, Counting) {
    let (store, randomness) = (MemoryStore::new(), Counting::new(0));
    let ids = credentials
        .iter()
        .map(|credential| add(&store, &new(*credential), &master(), CONFIG, &randomness).unwrap())
        .collect();
    (store, ids, randomness)
}

#[test]
fn each_credential_opens_its_own_slot_to_the_same_secret() {
    let (store, ids, _) = with(&[ALICE, BOB, KEY_FILE]);
    for (id, credential) in ids.iter().zip([ALICE, BOB, KEY_FILE]) {
        let unlocked = unlock(&store, credential).unwrap();
        assert_eq!(unlocked.slot.id, *id);
        assert_eq!((unlocked.master, &*unlocked.config), (master(), CONFIG));
        assert!(unlocked.damaged.is_empty());
    }
    let listing = list(&store).unwrap();
    assert_eq!(listing.slots.len(), 3);
    assert!(listing.being_removed.is_empty() && listing.damaged.is_empty());
}

#[test]
fn a_wrong_password_error_lists_the_tried_slots() {
    let (store, ids, _) = with(&[ALICE, BOB, KEY_FILE]);
    let error = unlock(&store, Credential::Password(b"eve")).unwrap_err();
    let KeyError::WrongCredential { tried, damaged, .. } = &error else {
        panic!("{error}");
    };
    assert_eq!(
        tried.iter().map(|slot| slot.id).collect::<BTreeSet<_>>(),
        ids[..2].iter().copied().collect()
    );
    assert!(damaged.is_empty());
    assert!(
        error.to_string().contains(&format!("{} (password, \"label\")", ids[0])),
        "{error}"
    );

    let (store, _, _) = with(&[KEY_FILE]);
    let error = unlock(&store, ALICE).unwrap_err();
    assert!(
        matches!(&error, KeyError::NoSlotFor { present, .. } if present.len() == 1),
        "{error}"
    );
    assert!(matches!(
        unlock(&MemoryStore::new(), ALICE),
        Err(KeyError::NoSlots { .. })
    ));
}

/// Otherwise an attacker with write access to the store could make the next backup encrypt under a secret of the
/// attacker.
#[test]
fn an_open_slot_is_not_used_instead_of_a_password() {
    let (store, ids, randomness) = with(&[ALICE]);
    let foreign = MasterSecret::from_bytes([66; 32]);
    add(&store, &new(Credential::Open), &foreign, CONFIG, &randomness).unwrap();
    assert_eq!(unlock(&store, ALICE).unwrap().master, master());
    store.delete(&ids[0].object()).unwrap();
    assert!(matches!(unlock(&store, ALICE), Err(KeyError::NoSlotFor { .. })));
    assert_eq!(unlock(&store, Credential::Open).unwrap().master, foreign);
}

#[test]
fn a_damaged_slot_is_named_and_the_others_open() {
    let (store, ids, _) = with(&[ALICE, BOB]);
    let mut bytes = store.get(&ids[0].object(), SLOT_BYTES_MAX).unwrap();
    bytes[40] ^= 1;
    store.damage(&ids[0].object(), &bytes);
    let stray = ObjectName::new(ObjectKind::Key, "stray").unwrap();
    store.put(&stray, b"stray").unwrap();
    let large = ObjectName::new(ObjectKind::Key, "00000000000000ff").unwrap();
    store.put(&large, &vec![0; 1 << 20]).unwrap();
    let unlocked = unlock(&store, BOB).unwrap();
    let damaged: BTreeSet<_> = unlocked.damaged.into_iter().map(|(name, _)| name).collect();
    assert_eq!(damaged, BTreeSet::from([ids[0].object(), stray, large]));
    let error = unlock(&store, ALICE).unwrap_err();
    assert!(
        matches!(&error, KeyError::WrongCredential { damaged, .. } if damaged.contains(&ids[0])),
        "{error}"
    );
    assert!(error.to_string().contains(&ids[0].to_string()), "{error}");
}

#[test]
fn a_slot_that_cannot_be_read_is_not_a_wrong_password() {
    let (store, _, _) = with(&[ALICE, BOB]);
    let plan = FaultPlan {
        operation: 2,
        fault: Fault::Io,
        span: FaultSpan::Once,
    };
    let faulty = || FaultStore::new(Arc::new(store.clone()), Some(plan), 0);
    let opened = [ALICE, BOB].map(|credential| unlock(&faulty(), credential));
    assert_eq!(opened.iter().filter(|opened| opened.is_ok()).count(), 1);
    for error in opened.into_iter().filter_map(std::result::Result::err) {
        assert!(matches!(error, KeyError::Store(StoreError::Io { .. })), "{error}");
    }
}

#[test]
fn a_new_password_replaces_the_old_one() {
    let (store, ids, randomness) = with(&[ALICE]);
    let unlocked = unlock(&store, ALICE).unwrap();
    let stronger = NewSlot {
        parameters: KdfParameters { iterations: 2, ..CHEAP },
        ..new(BOB)
    };
    let id = replace(&store, &unlocked, &stronger, &randomness).unwrap();
    assert_ne!(id, ids[0]);
    assert!(unlock(&store, ALICE).is_err());
    let unlocked = unlock(&store, BOB).unwrap();
    assert_eq!((unlocked.master, &*unlocked.config), (master(), CONFIG));
    assert_eq!(unlocked.slot.parameters.unwrap().iterations, 2);
    assert_eq!(store.objects().len(), 1, "no marker is left");
}

/// Fails and crashes at every operation of a password change: afterwards the old password or the new one opens the
/// repository.
#[test]
fn an_interrupted_password_change_leaves_a_working_password() {
    for fault in [Fault::Crash, Fault::Io, Fault::NoSpace] {
        let mut struck = 0;
        for operation in 1..30 {
            for seed in 0..4 {
                let (store, _, randomness) = with(&[ALICE]);
                let unlocked = unlock(&store, ALICE).unwrap();
                let plan = FaultPlan {
                    operation,
                    fault,
                    span: FaultSpan::Forever,
                };
                let faulty = FaultStore::new(Arc::new(store.clone()), Some(plan), seed);
                let replaced = replace(&faulty, &unlocked, &new(BOB), &randomness);
                assert_eq!(replaced.is_err(), faulty.has_failed());
                struck += u32::from(faulty.has_failed());
                let opened = [ALICE, BOB].map(|credential| unlock(&store, credential));
                assert!(
                    opened.iter().any(std::result::Result::is_ok),
                    "{fault:?} at {operation}, seed {seed}"
                );
                for unlocked in opened.into_iter().flatten() {
                    assert_eq!(unlocked.master, master());
                }
                assert!(replaced.is_err() || unlock(&store, BOB).is_ok());
            }
        }
        assert!(struck >= 4 * 4, "{fault:?} struck {struck} times");
    }
}

#[test]
fn the_last_slot_is_removed_only_by_force() {
    let (store, ids, randomness) = with(&[ALICE, BOB]);
    remove(&store, ids[0], Removal::KeepLast, &randomness).unwrap();
    let refused = remove(&store, ids[1], Removal::KeepLast, &randomness);
    assert!(matches!(refused, Err(KeyError::LastSlot { id }) if id == ids[1]));
    assert_eq!(store.objects().len(), 1, "the marker of the refused removal is gone");
    let refused = remove(&store, ids[0], Removal::KeepLast, &randomness);
    assert!(matches!(refused, Err(KeyError::NoSuchSlot { .. })));
    remove(&store, ids[1], Removal::AllowLast, &randomness).unwrap();
    assert!(store.objects().is_empty());
}

#[test]
fn a_damaged_slot_does_not_count_as_the_last_one() {
    let (store, ids, randomness) = with(&[ALICE, BOB]);
    store.damage(&ids[0].object(), b"damaged");
    assert!(matches!(
        remove(&store, ids[1], Removal::KeepLast, &randomness),
        Err(KeyError::LastSlot { .. })
    ));
    remove(&store, ids[0], Removal::KeepLast, &randomness).unwrap();
}

/// Three hosts remove three slots concurrently, two of them the same slot, and one host may crash: in any order, one
/// slot stays.
#[test]
fn concurrent_removals_leave_one_slot() {
    let mut left = BTreeSet::new();
    for seed in 0..3000 {
        let (store, ids, _) = with(&[ALICE, BOB]);
        let interleaver = Interleaver::new(seed);
        let stores: Vec<_> = (0..3)
            .map(|actor| {
                let plan = (actor == 0 && seed % 3 == 0).then_some(FaultPlan {
                    operation: 1 + seed / 3 % 12,
                    fault: Fault::Crash,
                    span: FaultSpan::Forever,
                });
                interleaver.actor(Arc::new(FaultStore::new(Arc::new(store.clone()), plan, seed)))
            })
            .collect();
        let actors = (0..)
            .zip(stores.iter().zip([ids[0], ids[1], ids[0]]))
            .map(|(number, (store, id))| {
                Box::new(move || {
                    let randomness = Counting::new(1000 * (number + 1));
                    remove(store, id, Removal::KeepLast, &randomness).ok();
                }) as Box<dyn FnOnce() + Send + '_>
            })
            .collect();
        assert!(interleaver.run(actors).iter().all(std::result::Result::is_ok));
        let listing = list(&store).unwrap();
        assert!(!listing.slots.is_empty(), "seed {seed}: {:?}", interleaver.steps());
        left.insert(listing.slots.iter().map(|slot| slot.id == ids[0]).collect::<Vec<_>>());
    }
    assert_eq!(left.len(), 3, "{left:?}");
}

#[test]
fn the_number_of_slots_is_limited() {
    let (store, ids, randomness) = with(&[KEY_FILE; SLOT_COUNT_MAX]);
    let refused = add(&store, &new(KEY_FILE), &master(), CONFIG, &randomness);
    assert!(matches!(refused, Err(KeyError::TooManySlots { .. })));
    for number in 0..=OBJECT_COUNT_MAX {
        store
            .put(
                &SlotId::from_object(&ObjectName::new(ObjectKind::Key, &format!("{number:016x}")).unwrap())
                    .unwrap()
                    .object(),
                b"",
            )
            .unwrap();
    }
    let refused = add(&store, &new(KEY_FILE), &master(), CONFIG, &randomness);
    assert!(matches!(refused, Err(KeyError::TooManySlots { .. })));
    // Additional slots do not lock out the owner of a known slot.
    for choice in [SlotChoice::Only(ids[5]), SlotChoice::First(ids[5])] {
        assert_eq!(unlock_chosen(&store, KEY_FILE, choice).unwrap().slot.id, ids[5]);
    }
    let absent = SlotChoice::Only(SlotId::generate(&randomness).unwrap());
    assert!(matches!(
        unlock_chosen(&store, KEY_FILE, absent),
        Err(KeyError::NoSuchSlot { .. })
    ));
}

/// An attacker with write access to the store can add slots that are cheaper than the real one and do not open. The
/// time for trying them is bounded, and zero if the slot is given.
#[test]
fn the_cost_of_foreign_slots_is_bounded() {
    let (store, ids, randomness) = with(&[BOB]);
    let parameters = KdfParameters { memory_kib: 9, ..CHEAP };
    let real = NewSlot {
        parameters,
        ..new(ALICE)
    };
    let real = add(&store, &real, &master(), CONFIG, &randomness).unwrap();
    let bytes = store.get(&ids[0].object(), SLOT_BYTES_MAX).unwrap();
    for number in 1..SLOT_COUNT_MAX - 1 {
        let name = ObjectName::new(ObjectKind::Key, &format!("{number:016x}")).unwrap();
        store.put(&name, &bytes).unwrap();
    }
    // The maximum number of slots: the real one is the last that is tried.
    assert_eq!(unlock(&store, ALICE).unwrap().slot.id, real);
    let name = ObjectName::new(ObjectKind::Key, &format!("{SLOT_COUNT_MAX:016x}")).unwrap();
    store.put(&name, &bytes).unwrap();
    let refused = unlock(&store, ALICE).unwrap_err();
    let KeyError::SlotsNotTried { tried_count, .. } = refused else {
        panic!("{refused}");
    };
    assert_eq!(tried_count, SLOT_COUNT_MAX);
    for choice in [SlotChoice::First(real), SlotChoice::Only(real)] {
        assert_eq!(unlock_chosen(&store, ALICE, choice).unwrap().slot.id, real);
    }
    // A remembered slot that is missing or has another password is only a hint.
    assert_eq!(
        unlock_chosen(&store, BOB, SlotChoice::First(real)).unwrap().slot.kind,
        CredentialKind::Password
    );
    assert!(unlock_chosen(&store, BOB, SlotChoice::Only(real)).is_err());
    assert!(!is_enough(0, 0) && !is_enough(SLOT_COUNT_MAX - 1, COST_MAX - 1));
    assert!(is_enough(SLOT_COUNT_MAX, 0) && is_enough(1, COST_MAX));
    assert_eq!(COST_MAX, 64 * KdfParameters::default().cost());
}
