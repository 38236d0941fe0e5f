//! Overlays, also after a power cut or a disk failure.

use std::sync::{Arc, Mutex};

use holdfast_block::conformance::{Conformance, contents, test_seed};
use holdfast_block::{
    BackingId, BlockDevice, BlockDeviceMut, CommitReport, CrashLog, CrashLogDevice, Error, ExtentKind, Fault,
    FaultRule, FaultyDevice, FileDeviceMut, IoMode, MemoryDevice, OverlayDevice, OverlayInfo, OverlayOptions,
    OverlayState, Request, RequestKind, SeededRandom, TracedDevice, to_usize,
};

const ID: BackingId = BackingId(*b"sixteen bytes id");
const SECTOR: usize = 512;

fn options(cluster_size_bytes: u32) -> OverlayOptions {
    OverlayOptions {
        backing_id: ID,
        cluster_size_bytes,
    }
}

fn store(size_bytes: u64, cluster_size_bytes: u32) -> MemoryDevice {
    MemoryDevice::new(options(cluster_size_bytes).store_size_bytes(size_bytes).unwrap())
}

/// Random bytes with ranges of zeroes; equal for devices of the same size.
fn pattern(size_bytes: u64) -> MemoryDevice {
    let mut random = SeededRandom::new(size_bytes);
    let mut bytes = random.bytes(to_usize(size_bytes));
    bytes.chunks_mut(3000).step_by(3).for_each(|piece| piece.fill(0));
    MemoryDevice::from_bytes(&bytes)
}

#[test]
fn conforms_over_a_backing_that_is_not_zero() {
    for cluster in [512, 4096, 65_536] {
        Conformance::new().check_mutable(|size| {
            OverlayDevice::create(pattern(size), store(size, cluster), options(cluster)).unwrap()
        });
    }
}

#[test]
fn flushed_data_survives_reopening_and_the_file_is_sparse() {
    use std::os::unix::fs::MetadataExt;
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("overlay");
    let size = 1 << 36;
    let backing = MemoryDevice::new(size);
    let store_size = options(4096).store_size_bytes(size).unwrap();
    {
        let file = FileDeviceMut::create_new(&path, store_size, IoMode::Buffered).unwrap();
        let overlay = OverlayDevice::create(&backing, file, options(4096)).unwrap();
        overlay.write_at(b"far away", size - 8).unwrap();
        overlay.write_zeroes(1 << 20..1 << 30).unwrap();
        overlay.flush().unwrap();
    }
    assert!(std::fs::metadata(&path).unwrap().blocks() * 512 < 1 << 20);
    let overlay = OverlayDevice::open(&backing, FileDeviceMut::open(&path, IoMode::Buffered).unwrap(), ID).unwrap();
    let mut bytes = [0; 8];
    overlay.read_at(&mut bytes, size - 8).unwrap();
    assert_eq!(&bytes, b"far away");
    let kinds: Vec<_> = overlay
        .extents(0..size, 10)
        .unwrap()
        .iter()
        .map(|extent| (extent.length, extent.kind))
        .collect();
    assert_eq!(
        kinds,
        [
            (1 << 20, ExtentKind::Absent),
            ((1 << 30) - (1 << 20), ExtentKind::Zero),
            (size - (1 << 30) - 4096, ExtentKind::Absent),
            (4096, ExtentKind::Data),
        ]
    );
}

#[test]
fn another_backing_another_size_and_a_used_store_are_refused() {
    let store = store(10_000, 512);
    OverlayDevice::create(MemoryDevice::new(10_000), &store, options(512)).unwrap();
    let other = OverlayDevice::open(MemoryDevice::new(10_000), &store, BackingId([0; 16])).unwrap_err();
    assert!(matches!(other, Error::WrongBacking { .. }), "{other}");
    let smaller = OverlayDevice::open(MemoryDevice::new(9_999), &store, ID).unwrap_err();
    assert!(smaller.to_string().contains("9999 bytes"), "{smaller}");
    let again = OverlayDevice::create(MemoryDevice::new(10_000), &store, options(512)).unwrap_err();
    assert!(again.to_string().contains("already holds an overlay"), "{again}");
    let info = OverlayInfo::read(&store).unwrap();
    assert_eq!(
        (info.size_bytes, info.cluster_size_bytes, info.backing_id),
        (10_000, 512, ID)
    );
    for cluster in [0, 256, 1000, 1 << 21] {
        assert!(options(cluster).store_size_bytes(1).is_err());
    }
    let small = MemoryDevice::new(options(512).store_size_bytes(10_000).unwrap() - 1);
    assert!(OverlayDevice::create(MemoryDevice::new(10_000), small, options(512)).is_err());
}

/// Every damaged bit in header or map is detected when the overlay is opened.
#[test]
fn every_flipped_bit_of_header_or_map_is_detected() {
    let backing = pattern(10_000);
    let store = store(10_000, 512);
    let overlay = OverlayDevice::create(&backing, &store, options(512)).unwrap();
    overlay.write_at(&[7; 700], 100).unwrap();
    overlay.write_zeroes(5000..8000).unwrap();
    overlay.flush().unwrap();
    let good = store.to_bytes();
    for at in (0..68 * 8).chain(4096 * 8..(4096 + 512) * 8) {
        let mut damaged = good.clone();
        damaged[at / 8] ^= 1 << (at % 8);
        let opened = OverlayDevice::open(&backing, MemoryDevice::from_bytes(&damaged), ID);
        assert!(opened.is_err(), "bit {} of byte {}", at % 8, at / 8);
    }
}

/// Applies a random operation to the device and the model, with offsets that are multiples of `alignment`. Returns
/// whether the device succeeded.
fn operate(device: &dyn BlockDeviceMut, model: &mut [u8], alignment: u64, random: &mut SeededRandom) -> bool {
    let range = random.range_within(model.len() as u64, 9000);
    let end = range.end / alignment * alignment;
    let range = (range.start / alignment * alignment).min(end)..end;
    let part = &mut model[to_usize(range.start)..to_usize(range.end)];
    match random.below(8) {
        0..=4 => {
            let data = random.bytes(part.len());
            part.copy_from_slice(&data);
            device.write_at(&data, range.start).is_ok()
        }
        5 | 6 => {
            part.fill(0);
            device.write_zeroes(range).is_ok()
        }
        _ => {
            // A trim of an overlay zeroes whole clusters only, so trim the whole device.
            model.fill(0);
            device.trim(0..model.len() as u64).is_ok()
        }
    }
}

/// The state after an operation: the length of the log, the expected content, and whether the operation was a flush.
struct Moment {
    change_count: usize,
    model: Vec<u8>,
    flushed: bool,
}

/// Runs random operations and flushes on an overlay whose store logs its writes.
fn history(cluster: u32, seed: u64) -> (MemoryDevice, Arc<CrashLog>, Vec<Moment>) {
    let mut random = SeededRandom::new(seed);
    let backing = pattern(40_000 + random.below(2000));
    let device = CrashLogDevice::new(store(backing.size_bytes(), cluster));
    let log = device.log();
    let mut model = backing.to_bytes();
    let overlay = OverlayDevice::create(&backing, device, options(cluster)).unwrap();
    let moment = |model: &[u8], flushed| Moment {
        change_count: log.change_count(),
        model: model.to_vec(),
        flushed,
    };
    let mut moments = vec![moment(&model, true)];
    for _ in 0..60 {
        let flushed = random.one_in(5);
        if flushed {
            overlay.flush().unwrap();
        } else {
            assert!(operate(&overlay, &mut model, 1, &mut random));
        }
        moments.push(moment(&model, flushed));
    }
    drop(overlay);
    (backing, log, moments)
}

/// Cuts the power at every write and every flush of the store. Flushed data survives; each sector that was written
/// later has one of the contents that it had since the flush.
#[test]
fn a_power_cut_at_any_write_loses_no_flushed_data() {
    let seed = test_seed();
    for (cluster, seed) in [(512, seed), (1024, seed ^ 1), (4096, seed ^ 2), (16_384, seed ^ 3)] {
        let (backing, log, moments) = history(cluster, seed);
        let created = moments[0].change_count;
        for at in created..=log.change_count() {
            let flushed = moments
                .iter()
                .rposition(|moment| moment.flushed && moment.change_count <= at)
                .unwrap();
            let under_way = moments.partition_point(|moment| moment.change_count <= at);
            let possible = &moments[flushed..moments.len().min(under_way + 1)];
            for tear in 0..4 {
                let image = log.crash_image(at, seed ^ (at as u64) << 8 ^ tear);
                let reopened = OverlayDevice::open(&backing, image, ID).unwrap();
                let bytes = contents(&reopened);
                for (number, sector) in bytes.chunks(SECTOR).enumerate() {
                    let is_version = |moment: &Moment| moment.model.chunks(SECTOR).nth(number) == Some(sector);
                    assert!(
                        possible.iter().any(is_version),
                        "sector {number} is neither old nor new after a power cut at change {at} (cluster {cluster})"
                    );
                }
            }
        }
    }
}

/// A power cut during the creation leaves no overlay, or an empty one.
#[test]
fn a_power_cut_while_creating_leaves_nothing_or_an_empty_overlay() {
    let backing = pattern(40_000);
    let mut noise = SeededRandom::new(3).bytes(to_usize(options(512).store_size_bytes(40_000).unwrap()));
    noise[..SECTOR].fill(0);
    let device = CrashLogDevice::new(MemoryDevice::from_bytes(&noise));
    let log = device.log();
    OverlayDevice::create(&backing, device, options(512)).unwrap();
    for at in 0..=log.change_count() {
        for seed in 0..20 {
            match OverlayDevice::open(&backing, log.crash_image(at, seed), ID) {
                Ok(overlay) => assert!(contents(&overlay) == backing.to_bytes()),
                Err(error) => assert!(at < log.change_count(), "{error}"),
            }
        }
    }
}

/// For every kind of request and every n, the n-th request to the store fails once, completely or in part. Data of
/// successful writes stays, each sector of a failed write is old or new, and after the next successful flush all of
/// that survives reopening.
#[test]
fn a_store_failure_at_any_request_loses_no_completed_write() {
    let seed = test_seed();
    let faults = [
        (RequestKind::Write, Fault::NoSpace),
        (RequestKind::Write, Fault::TornWrite { seed }),
        (RequestKind::Write, Fault::ShortWrite { keep_bytes: 1536 }),
        (RequestKind::WriteZeroes, Fault::Io),
        (RequestKind::Trim, Fault::Io),
        (RequestKind::Flush, Fault::Io),
        (RequestKind::Read, Fault::Io),
    ];
    for (kind, fault) in faults {
        // One history may contain no request of a kind; eight histories contain all kinds.
        let mut request_count = 0;
        for history in 0..8 {
            let mut number = 1;
            while fails_and_recovers(kind, fault, number, seed.wrapping_add(history)) {
                number += 1;
            }
            request_count += number - 1;
        }
        assert!(request_count > 0, "no request of kind {kind:?} was ever made");
    }
}

/// Runs one history with a fault; false if it had fewer than `number` requests of the kind.
fn fails_and_recovers(kind: RequestKind, fault: Fault, number: u64, seed: u64) -> bool {
    let mut random = SeededRandom::new(seed);
    let backing = pattern(20_480);
    let faulty = FaultyDevice::new(store(20_480, 1024));
    let overlay = OverlayDevice::create(&backing, &faulty, options(1024)).unwrap();
    faulty.add(FaultRule::nth(kind, faulty.count(kind) + number, fault));
    let before = faulty.count(kind);
    let mut model = backing.to_bytes();
    // The permitted contents of each sector: more than one after a failed write.
    let mut possible: Vec<Vec<Vec<u8>>> = model.chunks(SECTOR).map(|sector| vec![sector.to_vec()]).collect();
    for _ in 0..60 {
        if random.one_in(5) {
            // A failed flush guarantees nothing and must not do damage.
            drop(overlay.flush());
            continue;
        }
        let old = model.clone();
        let done = operate(&overlay, &mut model, SECTOR as u64, &mut random);
        for (versions, (old, new)) in possible.iter_mut().zip(old.chunks(SECTOR).zip(model.chunks(SECTOR))) {
            if old != new && done {
                versions.clear();
            }
            if !versions.iter().any(|version| version == new) {
                versions.push(new.to_vec());
            }
        }
    }
    faulty.clear_rules();
    overlay.flush().unwrap();
    let bytes = contents(&overlay);
    for (number, (sector, versions)) in bytes.chunks(SECTOR).zip(&possible).enumerate() {
        assert!(
            versions.iter().any(|version| version == sector),
            "sector {number} has unexpected content"
        );
    }
    let happened = faulty.count(kind) >= before + number;
    drop(overlay);
    let image = faulty.into_inner();
    assert!(contents(&OverlayDevice::open(&backing, image, ID).unwrap()) == bytes);
    happened
}

fn written(overlay: &impl BlockDeviceMut, model: &mut [u8], seed: u64) {
    let mut random = SeededRandom::new(seed);
    for _ in 0..12 {
        let range = random.range_within(model.len() as u64, 6000);
        let part = &mut model[to_usize(range.start)..to_usize(range.end)];
        if random.one_in(3) {
            part.fill(0);
            overlay.write_zeroes(range).unwrap();
        } else {
            random.fill(part);
            overlay.write_at(part, range.start).unwrap();
        }
    }
    overlay.flush().unwrap();
}

#[test]
fn a_commit_moves_everything_into_the_backing_and_empties_the_overlay() {
    let backing = pattern(100_001);
    let mut model = backing.to_bytes();
    let mut overlay = OverlayDevice::create(&backing, store(100_001, 4096), options(4096)).unwrap();
    written(&overlay, &mut model, test_seed());
    let report = overlay.commit().unwrap();
    assert!(report.data_bytes > 0);
    assert!(backing.to_bytes() == model && contents(&overlay) == model);
    let list = overlay.extents(0..100_001, 5).unwrap();
    assert_eq!(
        (list.as_slice().len(), list.as_slice()[0].kind),
        (1, ExtentKind::Absent)
    );
    assert_eq!(overlay.commit().unwrap(), CommitReport::default());
    written(&overlay, &mut model, 1);
    assert!(contents(&overlay) == model && backing.to_bytes() != model);
}

/// Cuts the power of the store and the backing device at every request of a commit: what is read through the overlay is
/// always correct, and a second commit completes.
#[test]
fn a_commit_can_be_repeated_after_a_power_cut() {
    let seed = test_seed();
    let original = pattern(30_001);
    let mut model = original.to_bytes();
    let prepared = store(30_001, 1024);
    let overlay = OverlayDevice::create(&original, &prepared, options(1024)).unwrap();
    written(&overlay, &mut model, seed);
    drop(overlay);

    let (backing, store) = (CrashLogDevice::new(original), CrashLogDevice::new(prepared));
    let (backing_log, store_log) = (backing.log(), store.log());
    let points = Mutex::new(Vec::new());
    let note = |_: Request| {
        points
            .lock()
            .unwrap()
            .push((backing_log.change_count(), store_log.change_count()));
    };
    let traced = (TracedDevice::new(&backing, &note), TracedDevice::new(&store, &note));
    OverlayDevice::open(traced.0, traced.1, ID).unwrap().commit().unwrap();
    note(Request::flush());
    let mut points = points.into_inner().unwrap();
    points.dedup();
    assert!(points.len() > 10);

    let mut seen_committing = false;
    for (in_backing, in_store) in points {
        for tear in 0..6 {
            let backing = backing_log.crash_image(in_backing, seed ^ tear);
            let store = store_log.crash_image(in_store, seed ^ tear << 8);
            let mut overlay = OverlayDevice::open(&backing, store, ID).unwrap();
            seen_committing |= overlay.state() == OverlayState::Committing;
            assert!(
                contents(&overlay) == model,
                "read after a cut at {in_backing} and {in_store}"
            );
            overlay.commit().unwrap();
            assert!(overlay.state() == OverlayState::InUse && contents(&overlay) == model);
            assert!(
                backing.to_bytes() == model,
                "committed after a cut at {in_backing} and {in_store}"
            );
        }
    }
    assert!(seen_committing);
}

/// The store fails at any request of a commit, and the program continues: no earlier or later write is lost.
#[test]
fn a_failed_commit_leaves_a_working_overlay() {
    let seed = test_seed();
    for kind in [
        RequestKind::Write,
        RequestKind::WriteZeroes,
        RequestKind::Flush,
        RequestKind::Trim,
    ] {
        for number in 1.. {
            let backing = pattern(30_001);
            let mut model = backing.to_bytes();
            let faulty = FaultyDevice::new(store(30_001, 1024));
            let mut overlay = OverlayDevice::create(&backing, &faulty, options(1024)).unwrap();
            written(&overlay, &mut model, seed);
            faulty.add(FaultRule::nth(kind, faulty.count(kind) + number, Fault::Io));
            let outcome = overlay.commit();
            faulty.clear_rules();
            assert!(contents(&overlay) == model);
            // Overwrites data that is in the overlay: its map sector must not have been lost with the failed commit.
            written(&overlay, &mut model, seed ^ 1);
            drop(overlay);
            let mut overlay = OverlayDevice::open(&backing, &faulty, ID).unwrap();
            assert!(contents(&overlay) == model);
            overlay.commit().unwrap();
            assert!(backing.to_bytes() == model);
            if outcome.is_ok() {
                break;
            }
        }
    }
}
