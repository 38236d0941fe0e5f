//! Findings of verify and scrub: they name exactly the damaged data.

use std::sync::Arc;

use holdfast_block::{BlockDevice as _, MemoryDevice};
use holdfast_repo::store::{MemoryStore, ObjectKind, Store};
use holdfast_repo::{Compare, FindingKind, Repository, ScrubRequest, Selection, VerifyDepth, VerifyRequest};

use super::base::{Content, FULL, back_up, base, objects_of, open, store_of, verify};
use crate::common::{Disk, Watch, environment, init_request, names_of};

/// The reported ranges cannot be read, and everything else can.
#[test]
fn a_damaged_frame_names_the_ranges_that_cannot_be_read() {
    let store = MemoryStore::new();
    let shared: Arc<dyn Store> = Arc::new(store.clone());
    let repository = Repository::init(shared, &init_request(), environment(5)).unwrap();
    let mut disk = Disk::new(9 << 20, 8);
    disk.fill(0, 8 << 20);
    let content = Content {
        disk,
        memory: Vec::new(),
    };
    let snapshot = back_up(&repository, &content).unwrap();
    let mut objects = objects_of(&store);
    let (_, pack) = objects
        .iter_mut()
        .find(|(name, bytes)| name.kind() == ObjectKind::Pack && bytes.len() > 1 << 20)
        .unwrap();
    let middle = pack.len() / 2;
    pack[middle] ^= 1;
    let (repository, _) = open(&store_of(&objects), 6);
    let report = verify(&repository, VerifyDepth::Full);
    let [finding] = &report.findings[..] else {
        panic!("{:?}", report.findings)
    };
    let [touched] = &finding.touches[..] else {
        panic!("{finding:?}")
    };
    assert_eq!((touched.snapshot, &touched.disk[..]), (snapshot, "vda"));
    assert_eq!(
        touched.bytes,
        touched.ranges.iter().map(|range| range.end - range.start).sum::<u64>()
    );
    // At most the content of one frame.
    assert!(touched.bytes > 0 && touched.bytes <= 4 << 20);
    let device = repository.open_disk(snapshot, Some("vda")).unwrap();
    let mut block = vec![0; 4096];
    for offset in (0..9u64 << 20).step_by(4096) {
        let is_touched = touched.ranges.iter().any(|range| range.contains(&offset));
        assert_eq!(device.read_at(&mut block, offset).is_err(), is_touched, "{offset}");
    }
    // A check of the structure does not read frames, and scrub reports the same as verify.
    assert!(verify(&repository, VerifyDepth::Structure).is_clean());
    let scrubbed = repository.scrub(FULL, &Watch::default()).unwrap();
    assert_eq!(scrubbed.findings, report.findings);
}

#[test]
fn a_disk_is_compared_with_its_device_byte_for_byte() {
    let base = base();
    let (repository, _) = open(&store_of(&base.objects), 7);
    let (snapshot, content) = &base.snapshots[1];
    let compare = |bytes: &[u8]| {
        let device = MemoryDevice::from_bytes(bytes);
        let request = VerifyRequest {
            snapshots: Selection::Some(Vec::new()),
            depth: VerifyDepth::Structure,
            compare: Some(Compare {
                snapshot: *snapshot,
                disk: Some("vda"),
                device: &device,
            }),
            thread_count: 2,
        };
        repository.verify(&request, &Watch::default()).unwrap()
    };
    let same = compare(&content.disk.bytes);
    assert!(same.is_clean() && same.compared_bytes == content.disk.bytes.len() as u64);
    // Changes in data, in zeroes, and in the partial block at the end of the disk.
    let size = content.disk.bytes.len();
    for at in [0, 5000, 1200 << 10, size - 1] {
        let mut other = content.disk.bytes.clone();
        other[at] ^= 1;
        let report = compare(&other);
        assert_eq!(report.findings.len(), 1, "{at}");
        assert_eq!(report.findings[0].kind, FindingKind::Differs);
        assert!(report.findings[0].touches[0].ranges[0].contains(&(at as u64)), "{at}");
    }
    for too_short in [size - 4096, size / 2, 20, 0] {
        let report = compare(&content.disk.bytes[..too_short]);
        assert_eq!(report.findings[0].kind, FindingKind::Differs, "{too_short}");
    }
}

/// Scrubs of a part of the repository, oldest objects first, finally read everything, and record what they have read.
#[test]
fn partial_scrubs_finally_read_everything() {
    let base = base();
    let store = store_of(&base.objects);
    let (repository, _) = open(&store, 9);
    let mut read_bytes = 0;
    let total = repository.scrub(FULL, &Watch::default()).unwrap();
    assert_eq!(
        (total.read_bytes, total.read_pack_count),
        (total.pack_bytes, total.pack_count)
    );
    let some = ScrubRequest {
        percent: 20,
        thread_count: 1,
    };
    let mut rounds = 0;
    while read_bytes < total.pack_bytes && rounds < 10 {
        let report = repository.scrub(some, &Watch::default()).unwrap();
        assert!(report.is_remembered && report.read_pack_count < total.pack_count);
        read_bytes += report.read_bytes;
        rounds += 1;
    }
    assert!(rounds <= 5, "{rounds}");
    assert_eq!(names_of(&store, ObjectKind::Scrub).len(), 1);
}
