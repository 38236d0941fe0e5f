//! Images as targets: the image has the content of the disk and is free of errors, also after interruptions.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use holdfast_block::{BlockDevice as _, BlockDeviceMut as _, MemoryDevice, SeededRandom};
use holdfast_image::{Format, OpenOptions, check, open};
use holdfast_live_copy::{
    Error, ExistingTarget, InterruptedCopy, LiveCopyReport, ReceiveRequest, RefusalKind, Result, SocketConnector,
    StillSource,
};
use holdfast_transfer::SessionId;

use super::rig::{Rig, content_of};
use super::{MIB, disk};

fn request(rig: &Rig, device: &MemoryDevice, name: &str) -> ReceiveRequest {
    ReceiveRequest {
        target: rig.path(name),
        format: Path::new(name)
            .extension()
            .map(|format| format.to_str().unwrap().to_owned()),
        ..rig.request(device)
    }
}

fn copy(rig: &Rig, device: &MemoryDevice, request: ReceiveRequest) -> Result<LiveCopyReport> {
    rig.copy_as(&StillSource::new(device), rig.local(), request, Duration::ZERO)
}

fn journal_of(rig: &Rig, name: &str) -> PathBuf {
    rig.path(&format!(".{name}.holdfast-copy.journal"))
}

/// The image is of this format, free of errors and lost space, and has the content of the disk.
fn assert_image(path: &Path, device: &MemoryDevice) {
    let options = OpenOptions {
        format: path
            .extension()
            .and_then(|name| Format::from_name(name.to_str().unwrap())),
        ..OpenOptions::default()
    };
    let report = check(path, &options).unwrap();
    assert_eq!(
        (report.corruption_count, report.leak_count),
        (0, 0),
        "{}",
        path.display()
    );
    let image = open(path, &options).unwrap();
    let content = content_of(&image);
    let (disk, padding) = content.split_at(usize::try_from(device.size_bytes()).unwrap());
    assert!(disk == content_of(device), "{}", path.display());
    assert!(padding.len() < 512 && padding.iter().all(|byte| *byte == 0));
}

const NAMES: [&str; 6] = [
    "disk.qcow2",
    "disk.vdi",
    "disk.vhd",
    "disk.vhdx",
    "disk.vmdk",
    "disk.hds",
];

#[test]
fn a_disk_arrives_in_an_image_of_each_format() {
    for name in NAMES {
        let rig = Rig::new();
        // It ends within a sector.
        let device = disk(21, 12 * MIB + 300);
        copy(&rig, &device, request(&rig, &device, name)).unwrap();
        assert_image(&rig.path(name), &device);
        // Blocks of a VHDX have 8 MiB.
        let length = std::fs::metadata(rig.path(name)).unwrap().len();
        assert!(length < 9 * MIB || name == "disk.vhdx", "{name}: {length}");
        assert_eq!(rig.files(), [name]);
    }
}

/// The program is stopped in the middle, and its image is left as it was: the next one continues.
#[test]
fn another_program_continues_an_image() {
    for name in NAMES {
        let rig = Rig::new();
        let device = disk(22, 180 * MIB);
        let request = request(&rig, &device, name);
        let once = rig.breaking_when_synced_in(48 * MIB, journal_of(&rig, name));
        let error = rig.copy_as(&StillSource::new(&device), once, request.clone(), Duration::ZERO);
        assert!(matches!(error, Err(Error::GivenUp { .. })), "{name}: {error:?}");
        let report = copy(&rig, &device, request).unwrap();
        assert!(report.sent_bytes + report.zero_bytes < 170 * MIB, "{name}: {report:?}");
        assert_image(&rig.path(name), &device);
        assert_eq!(rig.files(), [name]);
    }
}

/// Each connection ends after some bytes, and with it the receiver. What it has confirmed is not compared again, so it must be
/// in the image.
#[test]
fn what_a_receiver_has_confirmed_is_in_its_image() {
    for name in NAMES {
        let rig = Rig::new();
        let device = disk(31, 48 * MIB);
        let source = StillSource::new(&device);
        let breaking = rig.breaking(5 * MIB);
        let report = rig
            .copy_as(&source, breaking, request(&rig, &device, name), Duration::from_secs(60))
            .unwrap();
        assert!(report.lost_connection_count >= 2, "{name}: {report:?}");
        assert_image(&rig.path(name), &device);
    }
}

/// A crash in the middle of a flush leaves a cluster that is counted and not used.
#[test]
fn space_that_a_crash_has_lost_is_freed() {
    use std::os::unix::fs::FileExt as _;
    let rig = Rig::new();
    let device = disk(32, 48 * MIB);
    let request = request(&rig, &device, "disk.qcow2");
    let once = rig.breaking_when_synced_in(8 * MIB, journal_of(&rig, "disk.qcow2"));
    rig.copy_as(&StillSource::new(&device), once, request.clone(), Duration::ZERO)
        .unwrap_err();
    let partial = rig.path(".disk.qcow2.holdfast-copy");
    let file = std::fs::File::options().read(true).write(true).open(&partial).unwrap();
    let word = |offset: u64| {
        let mut bytes = [0; 8];
        file.read_exact_at(&mut bytes, offset).unwrap();
        u64::from_be_bytes(bytes)
    };
    // The space after the end is counted as used.
    let cluster = file.metadata().unwrap().len().div_ceil(65_536) + 3;
    let refcounts = word(word(48));
    file.write_all_at(&1_u16.to_be_bytes(), refcounts + 2 * cluster)
        .unwrap();
    file.set_len((cluster + 1) * 65_536).unwrap();
    drop(file);
    let options = OpenOptions {
        format: Some(Format::Qcow2),
        ..OpenOptions::default()
    };
    assert_eq!(check(&partial, &options).unwrap().leak_count, 1);
    copy(&rig, &device, request).unwrap();
    assert_image(&rig.path("disk.qcow2"), &device);
}

/// Parts that are written again replace what was there, and zeroes free it.
#[test]
fn an_image_of_a_written_disk_is_as_of_the_freeze() {
    let rig = Rig::new();
    let source = super::TrackedSource::new(disk(23, 32 * MIB));
    let request = ReceiveRequest {
        target: rig.path("disk.qcow2"),
        format: Some("qcow2".to_owned()),
        ..rig.request(&source.device)
    };
    std::thread::scope(|scope| {
        scope.spawn(|| source.write_until_stopped(24));
        let report = rig.copy_as(&source, rig.local(), request, Duration::ZERO);
        source.is_stopped.store(true, std::sync::atomic::Ordering::SeqCst);
        report.unwrap();
    });
    let at_freeze = MemoryDevice::from_bytes(&source.at_freeze.lock().unwrap());
    assert_image(&rig.path("disk.qcow2"), &at_freeze);
}

#[test]
fn an_image_is_filled_from_a_seed_and_replaced_by_its_own_content() {
    let rig = Rig::new();
    let device = disk(25, 24 * MIB);
    let mut request = request(&rig, &device, "disk.qcow2");
    request.seed = Some(rig.seed("seed.raw", Format::Raw, &device));
    device.write_at(&SeededRandom::new(26).bytes(1 << 20), 5 * MIB).unwrap();
    let report = copy(&rig, &device, request.clone()).unwrap();
    assert!((MIB..MIB + 65_536).contains(&report.sent_bytes), "{report:?}");
    assert_image(&rig.path("disk.qcow2"), &device);
    device.write_at(&SeededRandom::new(27).bytes(1 << 20), 9 * MIB).unwrap();
    request.existing = ExistingTarget::Replace;
    request.seed = Some(holdfast_live_copy::Seed {
        path: rig.path("disk.qcow2"),
        format: None,
    });
    let report = copy(&rig, &device, request).unwrap();
    assert!((MIB..MIB + 65_536).contains(&report.sent_bytes), "{report:?}");
    assert_image(&rig.path("disk.qcow2"), &device);
}

/// The bytes of a raw disk are never taken for an image, and those of an image never for a disk.
#[test]
fn an_interrupted_copy_is_not_continued_in_another_format() {
    let device = disk(28, 12 * MIB);
    for (before, after) in [
        (None, Some("qcow2")),
        (Some("qcow2"), Some("vdi")),
        (Some("qcow2"), None),
    ] {
        let rig = Rig::new();
        let of = |format: Option<&str>| ReceiveRequest {
            format: format.map(str::to_owned),
            ..rig.request(&device)
        };
        let session = |format: Option<&str>| SessionId([u8::try_from(format.map_or(0, str::len)).unwrap(); 16]);
        let source = StillSource::new(&device);
        rig.copy_in(
            &source,
            rig.breaking(2 * MIB),
            of(before),
            Duration::ZERO,
            session(before),
        )
        .unwrap_err();
        let partial = std::fs::read(rig.path(".target.holdfast-copy")).unwrap();
        let error = rig.copy_in(&source, rig.local(), of(after), Duration::ZERO, session(after));
        assert!(
            matches!(
                &error,
                Err(Error::Refused {
                    kind: RefusalKind::OtherCopy,
                    ..
                })
            ),
            "{error:?}"
        );
        assert!(std::fs::read(rig.path(".target.holdfast-copy")).unwrap() == partial);
        let again = ReceiveRequest {
            interrupted: InterruptedCopy::Delete,
            ..of(after)
        };
        rig.copy_in(&source, rig.local(), again, Duration::ZERO, session(after))
            .unwrap();
    }
}

#[test]
fn what_cannot_be_an_image_is_refused() {
    let rig = Rig::new();
    let device = disk(29, MIB);
    for (name, format, reason) in [
        ("disk.hdd", "parallels", "would be a folder"),
        ("disk.qed", "qed", "cannot be written"),
        ("disk", "ext4", "cannot be written"),
    ] {
        let request = ReceiveRequest {
            format: Some(format.to_owned()),
            ..request(&rig, &device, name)
        };
        let error = copy(&rig, &device, request);
        let Err(Error::Refused {
            kind: RefusalKind::NotAllowed,
            reason: found,
            ..
        }) = error
        else {
            panic!("{error:?}")
        };
        assert!(found.contains(reason), "{name}: {found}");
        assert!(rig.files().is_empty());
    }
}

/// What a receiver answers that was built before there were formats.
#[test]
fn a_receiver_that_knows_no_formats_is_too_old() {
    let rig = Rig::new();
    let device = disk(30, MIB);
    let old = SocketConnector::new(
        Box::new(|| {
            let (ours, mut theirs) = UnixStream::pair()?;
            std::thread::spawn(move || {
                let mut line = String::new();
                BufReader::new(theirs.try_clone().unwrap())
                    .read_line(&mut line)
                    .unwrap();
                let answer = br#"{"refused":{"kind":"other-version","reason":"the request of the sender is not valid: unknown field `format`"}}"#;
                theirs.write_all(answer).and_then(|()| theirs.write_all(b"\n")).unwrap();
            });
            Ok(ours)
        }),
        "backup".to_owned(),
    );
    let request = request(&rig, &device, "disk.qcow2");
    let error = rig.copy_as(
        &StillSource::new(&device),
        std::sync::Arc::new(old),
        request,
        Duration::ZERO,
    );
    let Err(error @ Error::Refused { .. }) = error else {
        panic!("{error:?}")
    };
    let text = error.to_string();
    assert!(
        text.starts_with("backup: the holdfast there is too old for qcow2 images: "),
        "{text}"
    );
}
