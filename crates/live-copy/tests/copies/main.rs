//! Copies of disks by both sides in one process: while a program writes, over connections that break, to images and exports,
//! and with targets that cannot be used.

#![allow(clippy::unwrap_used, reason = "all of it is test")]

mod exports;
mod images;
mod rig;

use std::sync::atomic::Ordering;
use std::time::Duration;

use holdfast_block::{BlockDeviceMut as _, MemoryDevice, SeededRandom};
use holdfast_image::Format;
use holdfast_live_copy::{
    ComparedSource, CopyCompression, Error, ExistingTarget, InterruptedCopy, ReceiveRequest, RefusalKind, Seed,
    SourceConsistency, StillSource,
};
use holdfast_transfer::UnitLayout;
use rig::{Rig, TrackedSource, UNIT_BYTES, WriterFreezer, content_of};

const MIB: u64 = 1 << 20;

fn disk(seed: u64, size_bytes: u64) -> MemoryDevice {
    let device = MemoryDevice::new(size_bytes);
    let mut random = SeededRandom::new(seed);
    // A third of the disk has data, the rest is zero.
    for piece in 0..size_bytes / MIB {
        if piece % 3 == 0 {
            device.write_at(&random.bytes(1 << 20), piece * MIB).unwrap();
        }
    }
    device
}

#[test]
fn a_disk_at_rest_arrives_once_and_zeroes_are_not_sent() {
    let rig = Rig::new();
    // The last unit is short.
    let device = disk(1, 24 * MIB + 512);
    let report = rig.copy(&StillSource::new(&device), rig.local()).unwrap();
    assert!(rig.target() == content_of(&device));
    assert!(report.sent_bytes < 9 * MIB, "{report:?}");
    assert_eq!(report.zero_bytes, 16 * MIB + 512);
    assert_eq!(report.handover.last_bytes, 0);
    assert_eq!(rig.files(), ["target"]);
}

#[test]
fn a_disk_that_is_written_meanwhile_is_copied_as_of_the_freeze() {
    let rig = Rig::new();
    let source = TrackedSource::new(disk(2, 32 * MIB));
    std::thread::scope(|scope| {
        scope.spawn(|| source.write_until_stopped(3));
        let report = rig.copy(&source, rig.local());
        source.is_stopped.store(true, Ordering::SeqCst);
        let report = report.unwrap();
        assert!(report.handover.frozen > Duration::ZERO, "{report:?}");
    });
    assert_eq!(source.freeze_count.load(Ordering::SeqCst), 1);
    assert!(source.write_count.load(Ordering::SeqCst) > 0);
    assert!(rig.target() == *source.at_freeze.lock().unwrap());
    assert_eq!(rig.files(), ["target"]);
}

#[test]
fn what_commands_freeze_is_copied_by_comparison() {
    let rig = Rig::new();
    let source = TrackedSource::new(disk(4, 16 * MIB));
    let freezer = WriterFreezer(&source);
    let layout = UnitLayout::new(16 * MIB, UNIT_BYTES).unwrap();
    let compared = ComparedSource::new(&source.device, layout, &freezer);
    std::thread::scope(|scope| {
        scope.spawn(|| source.write_until_stopped(5));
        let report = rig.copy(&compared, rig.local());
        source.is_stopped.store(true, Ordering::SeqCst);
        report.unwrap();
    });
    assert!(rig.target() == *source.at_freeze.lock().unwrap());
}

/// Each connection ends after some bytes: the copy continues, and little is sent twice.
#[test]
fn connections_that_break_cost_little() {
    let rig = Rig::new();
    let source = TrackedSource::new(disk(6, 48 * MIB));
    let breaking = rig.breaking(5 * MIB);
    let report = std::thread::scope(|scope| {
        scope.spawn(|| source.write_until_stopped(7));
        let report = rig.copy(&source, breaking);
        source.is_stopped.store(true, Ordering::SeqCst);
        report.unwrap()
    });
    assert!(report.lost_connection_count >= 3, "{report:?}");
    assert!(rig.target() == *source.at_freeze.lock().unwrap());
    assert_eq!(rig.files(), ["target"]);
}

/// The program is stopped in the middle: the next one continues, and compares what has arrived.
#[test]
fn another_program_continues_an_interrupted_copy() {
    let rig = Rig::new();
    let device = disk(8, 180 * MIB);
    let request = rig.request(&device);
    let once = rig.breaking_when_synced(48 * MIB);
    let error = rig.copy_as(&StillSource::new(&device), once, request.clone(), Duration::ZERO);
    assert!(matches!(error, Err(Error::GivenUp { .. })), "{error:?}");
    assert_eq!(rig.files(), [".target.holdfast-copy", ".target.holdfast-copy.journal"]);
    let held_bytes = rig.held_unit_count() * u64::from(UNIT_BYTES);
    assert!(held_bytes > 0);
    let report = rig.copy(&StillSource::new(&device), rig.local()).unwrap();
    assert!(rig.target() == content_of(&device));
    let sent_bytes = report.sent_bytes + report.zero_bytes;
    assert!(sent_bytes < 181 * MIB - held_bytes, "{held_bytes} held: {report:?}");
    assert_eq!(rig.files(), ["target"]);
}

/// Records of a guest: each is different, and they compress.
fn compressible_disk(size_bytes: u64) -> MemoryDevice {
    let device = MemoryDevice::new(size_bytes);
    let records: Vec<String> = (0..size_bytes / 32)
        .map(|number| format!("record {number:>12} state: ok\n"))
        .collect();
    let records = records.concat();
    let length = usize::try_from(size_bytes).unwrap().min(records.len());
    device.write_at(&records.as_bytes()[..length], 0).unwrap();
    device
}

/// Slower than any compression, also on a busy machine.
const SLOW_BYTES_PER_S: u64 = 20 << 20;

#[test]
fn data_is_compressed_for_a_slow_connection() {
    let rig = Rig::new();
    let device = compressible_disk(24 * MIB);
    let report = rig
        .copy(&StillSource::new(&device), rig.slow(SLOW_BYTES_PER_S))
        .unwrap();
    assert!(rig.target() == content_of(&device));
    assert!(report.plain_bytes > 20 * MIB, "{report:?}");
    assert!(report.sent_bytes < report.plain_bytes / 2, "{report:?}");
}

#[test]
fn data_that_does_not_compress_is_sent_as_it_is() {
    let rig = Rig::new();
    let device = disk(20, 24 * MIB);
    let report = rig
        .copy(&StillSource::new(&device), rig.slow(SLOW_BYTES_PER_S))
        .unwrap();
    assert!(rig.target() == content_of(&device));
    assert!(
        report.plain_bytes > 8 * MIB && report.sent_bytes == report.plain_bytes,
        "{report:?}"
    );
}

#[test]
fn nothing_is_compressed_for_an_older_receiver_or_if_it_is_switched_off() {
    let device = compressible_disk(8 * MIB);
    for compression in [CopyCompression::Adaptive, CopyCompression::Off] {
        let rig = Rig::new().with_compression(compression);
        let connector = match compression {
            CopyCompression::Adaptive => rig.slow_and_older(SLOW_BYTES_PER_S),
            CopyCompression::Off => rig.slow(SLOW_BYTES_PER_S),
        };
        let report = rig.copy(&StillSource::new(&device), connector).unwrap();
        assert!(rig.target() == content_of(&device));
        assert!(
            report.plain_bytes > 7 * MIB && report.sent_bytes == report.plain_bytes,
            "{report:?}"
        );
    }
}

#[test]
fn a_disk_that_is_written_meanwhile_is_copied_compressed_as_of_the_freeze() {
    let rig = Rig::new();
    let source = TrackedSource::new(compressible_disk(16 * MIB));
    let report = std::thread::scope(|scope| {
        scope.spawn(|| source.write_until_stopped(21));
        let report = rig.copy(&source, rig.slow(SLOW_BYTES_PER_S));
        source.is_stopped.store(true, Ordering::SeqCst);
        report.unwrap()
    });
    assert!(report.sent_bytes < report.plain_bytes, "{report:?}");
    assert!(rig.target() == *source.at_freeze.lock().unwrap());
}

/// 8 MiB at 4 MiB per second, less a burst.
#[test]
fn a_limited_copy_sends_no_more_per_second() {
    let rig = Rig::new().with_rate(4 * MIB);
    let device = disk(22, 24 * MIB);
    let report = rig.copy(&StillSource::new(&device), rig.local()).unwrap();
    assert!(report.duration >= Duration::from_millis(1900), "{report:?}");
    assert!(rig.target() == content_of(&device));
}

/// 16 MiB would take a minute.
#[test]
fn there_is_no_limit_while_the_source_is_frozen() {
    let rig = Rig::new().with_rate(MIB / 4).with_frozen_max(Duration::from_secs(30));
    let mut source = TrackedSource::new(MemoryDevice::new(16 * MIB));
    source.last_write = SeededRandom::new(23).bytes(16 << 20);
    let report = rig.copy(&source, rig.local()).unwrap();
    assert_eq!(source.freeze_count.load(Ordering::SeqCst), 1, "{report:?}");
    assert!(rig.target() == *source.at_freeze.lock().unwrap());
}

#[test]
fn a_target_that_exists_is_kept_unless_it_is_to_be_replaced() {
    let rig = Rig::new();
    let device = disk(9, 4 * MIB);
    rig.write_target(b"old");
    let error = rig.copy(&StillSource::new(&device), rig.local());
    let Err(Error::Refused { reason, .. }) = error else {
        panic!("{error:?}")
    };
    assert!(reason.contains("exists"), "{reason}");
    assert_eq!(
        (rig.target(), rig.files()),
        (b"old".to_vec(), vec!["target".to_owned()])
    );
    let mut request = rig.request(&device);
    request.existing = ExistingTarget::Replace;
    let used = std::fs::File::options().write(true).open(rig.target_path()).unwrap();
    let lock = holdfast_block::lock_file(&used).unwrap();
    let error = rig.copy_as(&StillSource::new(&device), rig.local(), request.clone(), Duration::ZERO);
    let Err(Error::Refused { reason, .. }) = error else {
        panic!("{error:?}")
    };
    assert!(reason.contains("another process uses"), "{reason}");
    assert_eq!(
        (rig.target(), rig.files()),
        (b"old".to_vec(), vec!["target".to_owned()])
    );
    drop((lock, used));
    rig.copy_as(&StillSource::new(&device), rig.local(), request, Duration::ZERO)
        .unwrap();
    assert!(rig.target() == content_of(&device));
}

/// Three of 24 MiB differ from the seed, in an image of another format, and in the target itself, which is replaced.
#[test]
fn only_differences_from_a_seed_are_sent() {
    let rig = Rig::new();
    let device = disk(12, 24 * MIB);
    let seed = rig.seed("seed.qcow2", Format::Qcow2, &device);
    let mut random = SeededRandom::new(13);
    for place in [0, 7, 20] {
        device.write_at(&random.bytes(1 << 20), place * MIB).unwrap();
    }
    // Data in the seed, zeroes in the disk.
    device.write_zeroes(3 * MIB..4 * MIB).unwrap();
    let mut request = rig.request(&device);
    request.seed = Some(seed.clone());
    let copy = |request: &ReceiveRequest| {
        let source = StillSource::new(&device);
        rig.copy_as(&source, rig.local(), request.clone(), Duration::ZERO)
    };
    let report = copy(&request).unwrap();
    assert!(rig.target() == content_of(&device));
    assert!((3 * MIB..3 * MIB + 65_536).contains(&report.sent_bytes), "{report:?}");
    assert_eq!(rig.files(), ["seed.qcow2", "target"]);

    device.write_at(&random.bytes(1 << 20), 9 * MIB).unwrap();
    request.existing = ExistingTarget::Replace;
    request.seed = Some(Seed {
        path: rig.target_path(),
        format: Some("raw".to_owned()),
    });
    let report = copy(&request).unwrap();
    assert!(rig.target() == content_of(&device));
    assert!((MIB..MIB + 65_536).contains(&report.sent_bytes), "{report:?}");

    request.seed = Some(Seed {
        path: rig.target_path().with_file_name("absent"),
        format: None,
    });
    let error = copy(&request);
    assert!(
        matches!(&error, Err(Error::Refused { kind: RefusalKind::Seed, reason, .. }) if reason.contains("absent")),
        "{error:?}"
    );
    assert_eq!(rig.files(), ["seed.qcow2", "target"]);
}

/// The copy is interrupted while the seed is compared: what was not compared yet is compared by the next program.
#[test]
fn an_interrupted_copy_from_a_seed_goes_on_with_differences() {
    let rig = Rig::new();
    let device = disk(14, 180 * MIB);
    let seed = rig.seed("seed.raw", Format::Raw, &device);
    let mut random = SeededRandom::new(15);
    for place in [1, 100, 170] {
        device.write_at(&random.bytes(1 << 20), place * MIB).unwrap();
    }
    let mut request = rig.request(&device);
    request.seed = Some(seed);
    let once = rig.breaking(20_000);
    let error = rig.copy_as(&StillSource::new(&device), once, request.clone(), Duration::ZERO);
    assert!(matches!(error, Err(Error::GivenUp { .. })), "{error:?}");
    let report = rig
        .copy_as(&StillSource::new(&device), rig.local(), request, Duration::ZERO)
        .unwrap();
    assert!(rig.target() == content_of(&device));
    assert!(report.sent_bytes < 4 * MIB, "{report:?}");
}

#[test]
fn an_interrupted_copy_of_another_disk_is_refused_until_it_is_deleted() {
    let rig = Rig::new();
    let (first, second) = (disk(10, 12 * MIB), disk(11, 12 * MIB));
    let other = holdfast_transfer::SessionId([9; 16]);
    let once = rig.breaking(2 * MIB);
    rig.copy_in(
        &StillSource::new(&first),
        once,
        rig.request(&first),
        Duration::ZERO,
        other,
    )
    .unwrap_err();
    let error = rig.copy(&StillSource::new(&second), rig.local());
    let Err(Error::Refused { reason, .. }) = error else {
        panic!("{error:?}")
    };
    assert!(reason.contains("another session"), "{reason}");
    let mut request = rig.request(&second);
    request.interrupted = InterruptedCopy::Delete;
    rig.copy_as(&StillSource::new(&second), rig.local(), request, Duration::ZERO)
        .unwrap();
    assert!(rig.target() == content_of(&second));
}

/// The copy of a source that writes too fast ends with an error, and the source was never frozen.
#[test]
fn a_source_that_writes_too_fast_is_not_frozen() {
    let rig = Rig::new().with_frozen_max(Duration::ZERO);
    let source = TrackedSource::new(disk(12, 8 * MIB));
    let error = std::thread::scope(|scope| {
        scope.spawn(|| source.write_until_stopped(13));
        let error = rig.copy(&source, rig.local());
        source.is_stopped.store(true, Ordering::SeqCst);
        error
    });
    assert!(matches!(error, Err(Error::NotConverging(_))), "{error:?}");
    assert_eq!(source.freeze_count.load(Ordering::SeqCst), 0);
    assert!(!source.is_frozen.load(Ordering::SeqCst));
}

#[test]
fn consistency_words_are_stable() {
    let words = [
        SourceConsistency::AtRest,
        SourceConsistency::Commands,
        SourceConsistency::FileSystem,
        SourceConsistency::Crash,
    ]
    .map(SourceConsistency::word);
    assert_eq!(words, ["at-rest", "commands", "file-system", "crash"]);
}
