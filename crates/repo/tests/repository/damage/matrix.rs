//! Every kind of object with every kind of damage.

use holdfast_repo::store::{ObjectKind, ObjectName};
use holdfast_repo::{Error, FindingKind, VerifyDepth};

use super::base::{Base, FULL, back_up, base, open, repair, restores_all, store_of, verify};
use super::kinds::{DAMAGES, Damage, damaged};
use crate::common::Watch;

/// Whether the damage cannot be detected, because the store is valid without the object or with the swapped ones.
fn cannot_be_known(kind: ObjectKind, damage: Damage) -> bool {
    match damage {
        // No other object refers to it.
        Damage::Delete => matches!(
            kind,
            ObjectKind::Key
                | ObjectKind::Forgotten
                | ObjectKind::Writer
                | ObjectKind::Condemned
                | ObjectKind::Protected
                | ObjectKind::Scrub
        ),
        // A slot opens under any name.
        Damage::Swap => kind == ObjectKind::Key,
        _ => false,
    }
}

fn check_case(base: &Base, name: &ObjectName, damage: Damage, seed: u64) {
    let Some(objects) = damaged(&base.objects, name, damage) else {
        return;
    };
    let store = store_of(&objects);
    let (repository, warned) = open(&store, seed);
    repository.snapshots().unwrap();
    let mut restored = true;
    for (snapshot, content) in &base.snapshots {
        restored &= restores_all(&repository, *snapshot, content);
    }
    let verified = verify(&repository, VerifyDepth::Full);
    assert!(
        restored || !verified.is_clean() || name.kind() == ObjectKind::Snapshot,
        "verify missed damage that a restore found"
    );
    let scrubbed = repository.scrub(FULL, &Watch::default()).unwrap();
    let is_found = warned || !verified.is_clean() || !scrubbed.findings.is_empty();
    assert!(
        is_found || cannot_be_known(name.kind(), damage),
        "the damage was not found"
    );

    // Backs up the content of the snapshots, repairs, and asserts that everything is restored.
    for (_, content) in &base.snapshots {
        match back_up(&repository, content) {
            Ok(snapshot) => assert!(
                restores_all(&repository, snapshot, content),
                "the backup does not restore"
            ),
            // The damaged byte may be the format version of the object.
            Err(error) => assert!(error.is_damage() || matches!(error, Error::Key(_)), "{error}"),
        }
    }
    repair(&repository);
    for (_, content) in &base.snapshots {
        let snapshot = back_up(&repository, content).unwrap();
        assert!(
            restores_all(&repository, snapshot, content),
            "the backup does not restore"
        );
    }
    repair(&repository);
    // Reopened to have no caches.
    let (repository, _) = open(&store, seed + 1);
    // Pages of maps exist once, and a backup does not reproduce chunks that gc has cut. Relocations exist twice: both
    // copies are damaged only if they are swapped. Lost data is reported, and the snapshot can be removed.
    let may_be_lost =
        name.kind() == ObjectKind::Pack || (name.kind(), damage) == (ObjectKind::Relocation, Damage::Swap);
    let is_lost = may_be_lost
        && base
            .snapshots
            .iter()
            .any(|(snapshot, content)| !restores_all(&repository, *snapshot, content));
    if is_lost {
        for finding in verify(&repository, VerifyDepth::Full).findings {
            assert!(finding.kind.is_damage(), "{finding:?}");
            for touched in finding.touches {
                repository.unprotect(touched.snapshot).unwrap();
                if repository.snapshot(touched.snapshot).is_ok() {
                    repository.forget(touched.snapshot, "lost").unwrap();
                }
            }
        }
        repair(&repository);
    } else {
        for (snapshot, content) in &base.snapshots {
            assert!(
                restores_all(&repository, *snapshot, content),
                "an old snapshot was not healed"
            );
        }
    }
    // Without the record of its removal, a snapshot with remaining parts counts as lost.
    let is_expected = |finding: &holdfast_repo::Finding| {
        (name.kind(), damage) == (ObjectKind::Forgotten, Damage::Delete) && finding.kind == FindingKind::Missing
    };
    let verified = verify(&repository, VerifyDepth::Full);
    assert!(verified.findings.iter().all(is_expected), "{:#?}", verified.findings);
    let scrubbed = repository.scrub(FULL, &Watch::default()).unwrap();
    let left: Vec<_> = scrubbed
        .findings
        .iter()
        // A damaged slot may belong to a user: it is not removed automatically.
        .filter(|finding| !finding.object.starts_with("keys/"))
        .filter(|finding| !is_expected(finding))
        .collect();
    assert!(left.is_empty(), "{left:#?}");
}

fn check_kind(kind: ObjectKind) {
    let mut base = base();
    if kind != ObjectKind::Writer {
        // While a writer is at work, repair defers some changes to the next run.
        base.objects.retain(|name, _| name.kind() != ObjectKind::Writer);
    }
    let base = base;
    let names: Vec<&ObjectName> = base.objects.keys().filter(|name| name.kind() == kind).collect();
    assert!(!names.is_empty(), "the base has an object of each kind");
    for (number, name) in names.iter().enumerate() {
        for (place, damage) in DAMAGES.into_iter().enumerate() {
            let seed = 1000 + (number * 100 + place) as u64 * 2;
            println!("{name} {damage:?} seed {seed}");
            check_case(&base, name, damage, seed);
        }
    }
}

#[test]
fn config() {
    check_kind(ObjectKind::Config);
}

#[test]
fn key_slots() {
    check_kind(ObjectKind::Key);
}

#[test]
fn packs() {
    check_kind(ObjectKind::Pack);
}

#[test]
fn segments() {
    check_kind(ObjectKind::Index);
}

#[test]
fn snapshots() {
    check_kind(ObjectKind::Snapshot);
}

#[test]
fn forgotten() {
    check_kind(ObjectKind::Forgotten);
}

#[test]
fn writers() {
    check_kind(ObjectKind::Writer);
}

#[test]
fn condemned() {
    check_kind(ObjectKind::Condemned);
}

#[test]
fn relocations() {
    check_kind(ObjectKind::Relocation);
}

#[test]
fn protected() {
    check_kind(ObjectKind::Protected);
}

#[test]
fn scrub_records() {
    check_kind(ObjectKind::Scrub);
}
