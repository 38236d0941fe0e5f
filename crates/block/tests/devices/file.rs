//! Files as devices, on the file system of the temporary directory.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};

use holdfast_block::conformance::{Conformance, contents};
use holdfast_block::{
    BlockDevice, BlockDeviceMut, Error, ExtentKind, FileChange, FileDevice, FileDeviceMut, IoMode, ReadHint,
    SeededRandom, to_usize,
};

fn conforms(mode: IoMode) {
    let directory = tempfile::tempdir().unwrap();
    let mut number = 0;
    let conformance = Conformance::new();
    conformance.check_mutable(|size| {
        number += 1;
        FileDeviceMut::create_new(&directory.path().join(number.to_string()), size, mode).unwrap()
    });
    let path = directory.path().join("pattern");
    let bytes = conformance.pattern(100_001);
    File::create_new(&path).unwrap().write_all(&bytes).unwrap();
    conformance.check_read_only(&FileDevice::open(&path, mode).unwrap(), &bytes);
}

#[test]
fn conforms_buffered() {
    conforms(IoMode::Buffered);
}

#[test]
fn conforms_direct() {
    conforms(IoMode::Direct);
    conforms(IoMode::LargeDirect);
}

/// Requests that are longer than one bounce buffer, with all combinations of aligned and unaligned ends.
#[test]
fn large_direct_requests_transfer_all_bytes() {
    let directory = tempfile::tempdir().unwrap();
    let size = (3 << 20) + 777;
    let pattern = Conformance::new().pattern(size);
    let length = pattern.len();
    let ranges = [
        (0, length),
        (1, length),
        (0, length - 1),
        (4096, length - 1),
        (513, 2 << 20),
    ];
    let cases = [IoMode::Direct, IoMode::LargeDirect].map(|mode| ranges.map(|range| (mode, range)));
    for (number, &(mode, (start, end))) in cases.as_flattened().iter().enumerate() {
        let path = directory.path().join(number.to_string());
        let device = FileDeviceMut::create_new(&path, size, mode).unwrap();
        device.write_zeroes(0..size).unwrap();
        device.write_at(&pattern[start..end], start as u64).unwrap();
        let mut buffer = vec![0xEE; end - start];
        device.read_at(&mut buffer, start as u64).unwrap();
        assert!(buffer == pattern[start..end]);
        let all = contents(&device);
        assert!(all[..start].iter().chain(&all[end..]).all(|byte| *byte == 0));
        match device.io_mode() {
            IoMode::Direct | IoMode::LargeDirect => assert_eq!(device.direct_io_refusal(), None),
            IoMode::Buffered => assert!(device.direct_io_refusal().unwrap().contains("refuses direct I/O")),
        }
    }
}

/// procfs does not support direct I/O: the device reports that and uses the page cache.
#[test]
fn direct_io_falls_back_to_buffered_reads_with_a_reason() {
    let path = std::path::Path::new("/proc/version");
    let device = FileDevice::open(path, IoMode::Direct).unwrap();
    assert_eq!(device.io_mode(), IoMode::Buffered);
    assert!(device.direct_io_refusal().unwrap().contains("refuses direct I/O"));
    assert_eq!(device.size_bytes(), 0, "procfs gives no sizes");
}

#[test]
fn creating_is_sparse_private_and_refuses_an_existing_file() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk");
    let device = FileDeviceMut::create_new(&path, 1 << 40, IoMode::Buffered).unwrap();
    assert_eq!(device.size_bytes(), 1 << 40);
    let metadata = std::fs::metadata(&path).unwrap();
    assert_eq!(metadata.blocks(), 0);
    assert_eq!(metadata.permissions().mode() & 0o777, 0o600);
    let list = device.extents(0..1 << 40, 10).unwrap();
    assert_eq!((list.as_slice().len(), list.as_slice()[0].kind), (1, ExtentKind::Zero));

    let again = FileDeviceMut::create_new(&path, 5, IoMode::Buffered).unwrap_err();
    assert!(matches!(&again, Error::Path { source, .. } if source.kind() == std::io::ErrorKind::AlreadyExists));
    assert!(again.to_string().contains("disk"), "{again}");
    assert_eq!(std::fs::metadata(&path).unwrap().len(), 1 << 40);
}

/// No file system supports files of 2^63 bytes. The partly created file must be removed.
#[test]
fn a_file_that_cannot_have_its_size_is_not_left_behind() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk");
    assert!(FileDeviceMut::create_new(&path, i64::MAX as u64, IoMode::Buffered).is_err());
    assert!(!path.exists());
}

#[test]
fn directories_and_special_files_are_refused() {
    for path in ["/", "/dev/null"] {
        let error = FileDevice::open(path.as_ref(), IoMode::Buffered).unwrap_err();
        assert!(matches!(error, Error::Unsupported { .. }), "{error}");
    }
    let error = FileDevice::open("/nonexistent/disk".as_ref(), IoMode::Buffered).unwrap_err();
    assert!(matches!(error, Error::Path { .. }));
}

#[test]
fn zeroing_and_trimming_free_space() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk");
    let device = FileDeviceMut::create_new(&path, 1 << 20, IoMode::Buffered).unwrap();
    let blocks = || std::fs::metadata(&path).unwrap().blocks();
    device.write_at(&vec![1; 1 << 20], 0).unwrap();
    device.flush().unwrap();
    let full = blocks();
    device.write_zeroes(0..1 << 19).unwrap();
    let half = blocks();
    device.trim(1 << 19..1 << 20).unwrap();
    assert!(
        full > half && half > blocks(),
        "{full} blocks, then {half}, then {}",
        blocks()
    );
    let list = device.extents(0..1 << 20, 10).unwrap();
    assert!(list.iter().all(|extent| extent.kind == ExtentKind::Zero), "{list:?}");
}

/// If a file is truncated while it is open, reads and extents return an error, never zeroes.
#[test]
fn a_truncated_file_is_an_error() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk");
    let device = FileDeviceMut::create_new(&path, 100_000, IoMode::Buffered).unwrap();
    device.write_at(&vec![1; 100_000], 0).unwrap();
    for mode in [IoMode::Buffered, IoMode::Direct] {
        File::options()
            .write(true)
            .open(&path)
            .unwrap()
            .set_len(100_000)
            .unwrap();
        let reader = FileDevice::open(&path, mode).unwrap();
        assert!(reader.changed_since_open().unwrap().is_empty());
        File::options()
            .write(true)
            .open(&path)
            .unwrap()
            .set_len(50_000)
            .unwrap();
        let error = reader.read_at(&mut vec![0; 20_000], 40_000).unwrap_err();
        assert!(
            matches!(
                error,
                Error::Shrunk {
                    offset: 50_000,
                    size_bytes: 100_000,
                    actual_size_bytes: 50_000
                }
            ),
            "{error:?}"
        );
        assert!(error.to_string().contains("shrank"));
        assert!(matches!(reader.extents(60_000..70_000, 5), Err(Error::Shrunk { .. })));
        reader.read_at(&mut vec![0; 10_000], 40_000).unwrap();
        assert!(reader.changed_since_open().unwrap().contains(&FileChange::Size {
            before: 100_000,
            now: 50_000
        }));
    }
}

#[test]
fn a_write_during_reading_is_detected() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk");
    let file = File::create_new(&path).unwrap();
    file.set_len(4096).unwrap();
    let long_ago = std::time::UNIX_EPOCH + std::time::Duration::from_secs(1_000_000_000);
    file.set_modified(long_ago).unwrap();
    let reader = FileDevice::open(&path, IoMode::Buffered).unwrap();
    reader.advise(0..4096, ReadHint::Sequential).unwrap();
    reader.read_at(&mut [0; 4096], 0).unwrap();
    reader.advise(0..4096, ReadHint::DontNeed).unwrap();
    assert!(
        reader.changed_since_open().unwrap().is_empty(),
        "reading does not count as a change"
    );
    file.write_all_at(b"x", 17).unwrap();
    assert_eq!(reader.changed_since_open().unwrap(), [FileChange::Contents]);
    assert!(reader.advise(0..4097, ReadHint::WillNeed).is_err());
}

/// Buffered and direct requests alternate, at overlapping and adjacent ranges.
#[test]
fn direct_and_buffered_requests_see_each_others_writes() {
    let directory = tempfile::tempdir().unwrap();
    let size = 2 << 20;
    let device = FileDeviceMut::create_new(&directory.path().join("disk"), size, IoMode::LargeDirect).unwrap();
    let mut expected = vec![0; to_usize(size)];
    let mut random = SeededRandom::new(5);
    for number in 0..200 {
        let length_max = if number % 2 == 0 { 10_000 } else { 600_000 };
        let range = random.range_within(size, length_max);
        let bytes = random.bytes(to_usize(range.end - range.start));
        device.write_at(&bytes, range.start).unwrap();
        expected[to_usize(range.start)..to_usize(range.end)].copy_from_slice(&bytes);
        let read = random.range_within(size, 600_000);
        let mut buffer = vec![0; to_usize(read.end - read.start)];
        device.read_at(&mut buffer, read.start).unwrap();
        assert!(buffer == expected[to_usize(read.start)..to_usize(read.end)]);
    }
    device.flush().unwrap();
    assert!(contents(&device) == expected);
}

#[test]
fn flushed_data_survives_reopening() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk");
    let pattern = Conformance::new().pattern(70_001);
    {
        let device = FileDeviceMut::create_new(&path, 70_001, IoMode::Direct).unwrap();
        device.write_at(&pattern, 0).unwrap();
        device.flush().unwrap();
    }
    assert!(contents(&FileDevice::open(&path, IoMode::Buffered).unwrap()) == pattern);
    assert!(contents(&FileDeviceMut::open(&path, IoMode::Direct).unwrap()) == pattern);
}
