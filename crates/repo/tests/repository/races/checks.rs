//! Snapshots that are removed during a check of the repository.

use std::sync::Mutex;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use holdfast_repo::store::{ObjectKind, Store};
use holdfast_repo::{
    Error, FindingKind, JobProgress, Liveness, Parent, ScrubRequest, Selection, VerifyDepth, VerifyRequest,
};

use super::{REWRITE_ALL, another};
use crate::common::{Disk, Rig};

/// A progress that calls a function when the job reports its total.
struct HookedProgress<'a> {
    act: Mutex<Option<Box<dyn FnOnce() + Send + 'a>>>,
    cancelled: AtomicBool,
}

impl<'a> HookedProgress<'a> {
    fn new(act: impl FnOnce() + Send + 'a) -> Self {
        Self {
            act: Mutex::new(Some(Box::new(act))),
            cancelled: AtomicBool::new(false),
        }
    }
}

impl JobProgress for HookedProgress<'_> {
    fn advance(&self, _bytes: u64) {}

    fn cancelled(&self) -> &AtomicBool {
        &self.cancelled
    }

    fn total(&self, _total: u64) {
        let act = self.act.lock().unwrap().take();
        if let Some(act) = act {
            act();
        }
    }
}

/// Two snapshots with data of their own. During the check, the first one is removed, and gc deletes its packs; if
/// `loses`, a pack of the second one is deleted too.
fn check_while_one_is_removed<T>(
    loses: bool,
    check: impl FnOnce(&Rig, [holdfast_repo::SnapshotId; 2], &HookedProgress<'_>) -> T,
) -> T {
    let rig = Rig::new(31);
    let mut disk = Disk::new(1 << 20, 1);
    disk.fill(0, 1 << 20);
    let removed = rig.backup("m", &disk, Parent::Newest).snapshot.id;
    let packs = |rig: &Rig| {
        let names = rig.store.objects().into_keys();
        names.filter(|name| name.kind() == ObjectKind::Pack).collect::<Vec<_>>()
    };
    let before = packs(&rig);
    disk.fill(0, 1 << 20);
    let kept = rig.backup("m", &disk, Parent::Newest).snapshot.id;
    let other = another(&rig, 85, Liveness::Alive);
    let progress = HookedProgress::new(|| {
        other.forget(removed, "test").unwrap();
        assert!(other.gc(REWRITE_ALL).unwrap().deleted_pack_count > 0);
        if loses {
            let own = packs(&rig).into_iter().filter(|pack| !before.contains(pack));
            own.for_each(|pack| rig.store.delete(&pack).unwrap());
        }
    });
    check(&rig, [removed, kept], &progress)
}

const ALL_AT_FULL_DEPTH: VerifyRequest<'_> = VerifyRequest {
    snapshots: Selection::All,
    depth: VerifyDepth::Full,
    compare: None,
    thread_count: 2,
};

/// Regression: a prune and a gc ran during a verify, which reported the packs of the removed snapshots as lost.
#[test]
fn a_snapshot_removed_during_a_check_is_not_lost() {
    check_while_one_is_removed(false, |rig, _, progress| {
        let report = rig.repository.verify(&ALL_AT_FULL_DEPTH, progress).unwrap();
        assert!(report.is_clean(), "{:?}", report.findings);
        assert_eq!((report.snapshot_count, report.logical_bytes), (1, 1 << 20));
    });
    check_while_one_is_removed(false, |rig, [removed, _], progress| {
        let request = VerifyRequest {
            snapshots: Selection::Some(vec![removed]),
            ..ALL_AT_FULL_DEPTH
        };
        let result = rig.repository.verify(&request, progress);
        assert!(
            matches!(result, Err(Error::NoSnapshot { id }) if id == removed),
            "{result:?}"
        );
    });
    check_while_one_is_removed(false, |rig, _, progress| {
        let full = ScrubRequest {
            percent: 100,
            thread_count: 1,
        };
        let report = rig.repository.scrub(full, progress).unwrap();
        assert!(!report.has_damage(), "{:?}", report.findings);
    });
}

/// Regression: a verify took longer than the day for which the record of a removal is kept, and reported the removed
/// snapshot as lost.
#[test]
fn a_removal_that_is_older_than_its_record_is_no_loss() {
    let rig = Rig::new(32);
    let mut disk = Disk::new(1 << 20, 1);
    disk.fill(0, 1 << 20);
    let removed = rig.backup("m", &disk, Parent::Newest).snapshot.id;
    disk.fill(0, 1 << 20);
    rig.backup("m", &disk, Parent::Newest);
    let other = another(&rig, 87, Liveness::Alive);
    let progress = HookedProgress::new(|| {
        other.forget(removed, "test").unwrap();
        other.gc(REWRITE_ALL).unwrap();
        rig.store.advance_clock(Duration::from_secs(25 * 3600));
        other.gc(REWRITE_ALL).unwrap();
        let names = rig.store.objects().into_keys();
        assert_eq!(names.filter(|name| name.kind() == ObjectKind::Forgotten).count(), 0);
    });
    let report = rig.repository.verify(&ALL_AT_FULL_DEPTH, &progress).unwrap();
    assert!(report.is_clean(), "{:?}", report.findings);
    assert_eq!(report.snapshot_count, 1);
}

#[test]
fn lost_chunks_are_reported_despite_a_removal_during_a_check() {
    let is_of = |findings: &[holdfast_repo::Finding], kept| {
        let missing: Vec<_> = findings.iter().filter(|one| one.kind == FindingKind::Missing).collect();
        let mut touched = missing.iter().flat_map(|one| &one.touches);
        !missing.is_empty()
            && missing.iter().all(|one| !one.touches.is_empty())
            && touched.all(|one| one.snapshot == kept)
    };
    check_while_one_is_removed(true, |rig, [_, kept], progress| {
        let report = rig.repository.verify(&ALL_AT_FULL_DEPTH, progress).unwrap();
        assert!(is_of(&report.findings, kept), "{:?}", report.findings);
    });
    check_while_one_is_removed(true, |rig, [_, kept], progress| {
        let full = ScrubRequest {
            percent: 100,
            thread_count: 1,
        };
        let report = rig.repository.scrub(full, progress).unwrap();
        assert!(is_of(&report.findings, kept), "{:?}", report.findings);
    });
}
