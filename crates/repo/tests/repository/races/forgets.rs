//! Races of forget, protect and gc.

use holdfast_repo::store::ObjectKind;
use holdfast_repo::{Error, Liveness, Parent};

use super::{MONTH_AND_MORE, REWRITE_ALL, WEEK_AND_MORE, another};
use crate::common::{Disk, HookedStore, Rig};

/// Regression: a forget slept before it put its record, and the snapshot was protected meanwhile. gc ran between the
/// put and the moment in which the forget finds that its announcement is gone, and completed the forget: a protected
/// snapshot was deleted.
#[test]
fn gc_does_not_complete_a_forget_after_a_later_protection() {
    let rig = Rig::new(28);
    let mut disk = Disk::new(1 << 20, 1);
    disk.fill(0, 1 << 20);
    let id = rig.backup("m", &disk, Parent::Newest).snapshot.id;
    let (store, other) = (rig.store.clone(), another(&rig, 94, Liveness::Unknown));
    let gc = another(&rig, 93, Liveness::Unknown);
    let hooked = HookedStore::new(&rig.store, ObjectKind::Forgotten, move || {
        store.advance_clock(WEEK_AND_MORE);
        other.protect(id).unwrap();
    });
    let hooked = hooked.and_after(move || drop(gc.gc(REWRITE_ALL).unwrap()));
    let result = rig.open_on(hooked, 92).forget(id, "test");
    assert!(matches!(result, Err(Error::Locked { .. })), "{result:?}");
    crate::common::assert_restores(&another(&rig, 91, Liveness::Unknown), id, &disk.bytes);
}

/// The forget never woke up: after a month the snapshot is restored.
#[test]
fn a_protected_snapshot_is_restored_after_an_interrupted_forget() {
    let rig = Rig::new(29);
    let mut disk = Disk::new(1 << 20, 1);
    disk.fill(0, 1 << 20);
    let id = rig.backup("m", &disk, Parent::Newest).snapshot.id;
    let (store, other) = (rig.store.clone(), another(&rig, 94, Liveness::Unknown));
    let hooked = HookedStore::new(&rig.store, ObjectKind::Forgotten, move || {
        store.advance_clock(WEEK_AND_MORE);
        other.protect(id).unwrap();
    });
    let hooked = hooked.and_after(|| panic!("the process ends here"));
    let forgetting = rig.open_on(hooked, 92);
    let died = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| forgetting.forget(id, "test")));
    assert!(died.is_err());

    let reader = another(&rig, 91, Liveness::Unknown);
    reader.gc(REWRITE_ALL).unwrap();
    assert!(
        reader.snapshots().unwrap().0.is_empty(),
        "the forget may still be running"
    );
    rig.store.advance_clock(MONTH_AND_MORE);
    reader.gc(REWRITE_ALL).unwrap();
    crate::common::assert_restores(&reader, id, &disk.bytes);
}
