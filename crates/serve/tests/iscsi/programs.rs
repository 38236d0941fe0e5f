//! Initiators of others: libiscsi's tools and its conformance suite, and QEMU.

#![allow(clippy::disallowed_methods, reason = "the programs are what is tested against")]

use std::net::SocketAddr;
use std::ops::Range;
use std::process::Command;
use std::sync::Arc;

use holdfast_block::{BlockDevice, BlockDeviceMut, ExtentList, MemoryDevice, Result as DeviceResult, SystemClock};
use holdfast_serve::iscsi::{
    Authentication, ChapSecret, ChapUser, ExportDevice, InitiatorAccess, Limits, Listener, LogicalUnit, SectorSize,
    ServerResources, Target, TargetEvent, TargetServer, TargetServerOptions, TargetSet, UnitOptions,
};

use crate::targets::TARGET;

/// A server on a TCP port of this host.
struct TcpTarget {
    _server: TargetServer,
    address: SocketAddr,
}

/// A device in memory that prefers blocks of this size.
struct BlockHint {
    device: MemoryDevice,
    block_size_bytes: u32,
}

impl BlockDevice for BlockHint {
    fn size_bytes(&self) -> u64 {
        self.device.size_bytes()
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> DeviceResult<()> {
        self.device.read_at(buffer, offset)
    }

    fn extents(&self, range: Range<u64>, extent_count_max: usize) -> DeviceResult<ExtentList> {
        self.device.extents(range, extent_count_max)
    }

    fn block_size_bytes(&self) -> u32 {
        self.block_size_bytes
    }
}

impl BlockDeviceMut for BlockHint {
    fn write_at(&self, data: &[u8], offset: u64) -> DeviceResult<()> {
        self.device.write_at(data, offset)
    }

    fn write_zeroes(&self, range: Range<u64>) -> DeviceResult<()> {
        self.device.write_zeroes(range)
    }

    fn trim(&self, range: Range<u64>) -> DeviceResult<()> {
        self.device.trim(range)
    }

    fn flush(&self) -> DeviceResult<()> {
        self.device.flush()
    }
}

fn start(authentication: Authentication, sector_size: SectorSize) -> TcpTarget {
    start_with(authentication, sector_size, 4096)
}

fn start_with(authentication: Authentication, sector_size: SectorSize, block_size_bytes: u32) -> TcpTarget {
    let device = || {
        Arc::new(BlockHint {
            device: MemoryDevice::new(64 << 20),
            block_size_bytes,
        })
    };
    let options = |serial| UnitOptions {
        sector_size,
        ..UnitOptions::new(serial)
    };
    let units = vec![
        LogicalUnit::new(ExportDevice::Writable(device()), options("first")),
        LogicalUnit::new(ExportDevice::ReadOnly(device()), options("second")),
    ];
    let target = Target::new(TARGET, InitiatorAccess::Anyone, units).unwrap();
    let mut server = TargetServer::new(TargetServerOptions {
        targets: Arc::new(TargetSet::new([target])),
        authentication,
        resources: ServerResources::new(Limits::default()),
        clock: Arc::new(SystemClock::new()),
        events: Arc::new(|_: &TargetEvent<'_>| ()),
        randomness: Arc::new(|bytes: &mut [u8]| {
            bytes.fill(5);
            Ok(())
        }),
    });
    let listener = Listener::tcp(([127, 0, 0, 1], 0).into()).unwrap();
    let address = listener.tcp_address().unwrap();
    server.listen(listener).unwrap();
    TcpTarget {
        _server: server,
        address,
    }
}

impl TcpTarget {
    fn url(&self, lun: u32) -> String {
        format!("iscsi://{}/{TARGET}/{lun}", self.address)
    }
}

/// Runs a program; returns whether it succeeded, and its output.
fn run(program: &str, arguments: &[&str]) -> (bool, String) {
    let output = Command::new(program).args(arguments).output();
    let output = output.unwrap_or_else(|error| panic!("these tests need {program} (see scripts/setup): {error}"));
    let printed = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8_lossy(&printed).into_owned())
}

fn succeed(program: &str, arguments: &[&str]) -> String {
    let (is_success, printed) = run(program, arguments);
    assert!(is_success, "{program} {arguments:?}: {printed}");
    printed
}

#[test]
fn tools_of_libiscsi_find_targets_and_units() {
    let target = start(Authentication::None, SectorSize::Bytes512);
    let list = succeed("iscsi-ls", &["-s", &format!("iscsi://{}", target.address)]);
    assert!(list.contains(TARGET) && list.contains("Lun:1"), "{list}");
    let inquiry = succeed("iscsi-inq", &[&target.url(0)]);
    assert!(
        inquiry.contains("Vendor:HOLDFAST") && inquiry.contains("iSCSI"),
        "{inquiry}"
    );
    let page = succeed("iscsi-inq", &["-e", "1", "-c", "131", &target.url(0)]);
    assert!(page.contains("first") && page.contains(TARGET), "{page}");
    let capacity = succeed("iscsi-readcapacity16", &[&target.url(0)]);
    assert!(
        capacity.contains("Total size:67108864") && capacity.contains("LBPRZ:1"),
        "{capacity}"
    );
}

/// Runs the whole suite, in which only the tests in `known` may fail. Returns the number of tests that really passed:
/// the suite counts skipped ones as passed.
///
/// Skipped tests need removable media, a second path, SANITIZE, EXTENDED COPY, or other features that a disk of fixed
/// size has not.
fn run_suite(target: &TcpTarget, known: &[&str]) -> usize {
    let (_, printed) = run("iscsi-test-cu", &["-d", "-n", "-V", "-t", "ALL", &target.url(0)]);
    let failed: Vec<&str> = printed.lines().filter(|line| line.ends_with("had failures:")).collect();
    let is_known = |line: &&str| known.iter().any(|name| line.contains(name));
    assert!(failed.iter().all(is_known), "{failed:?}: {printed}");
    let summary = printed.lines().find(|line| line.trim_start().starts_with("tests "));
    let numbers: Vec<usize> = summary
        .unwrap_or_else(|| panic!("no summary: {printed}"))
        .split_whitespace()
        .filter_map(|word| word.parse().ok())
        .collect();
    let [_, ran, passed, failed_count, ..] = numbers.as_slice() else {
        panic!("{summary:?}");
    };
    assert_eq!((ran - passed, *failed_count), (failed.len(), failed.len()), "{printed}");
    let skipped = skipped_count(&printed);
    passed - skipped
}

/// Number of skipped tests. A command that the target does not know is reported twice for each test.
fn skipped_count(printed: &str) -> usize {
    let is_skip = |line: &str| line.contains("[SKIPPED]");
    let is_unknown = |line: &str| is_skip(line) && line.ends_with("is not implemented.");
    let lines: Vec<&str> = printed.lines().collect();
    let pairs = lines
        .windows(2)
        .filter(|pair| is_unknown(pair[0]) && is_unknown(pair[1]));
    lines.iter().filter(|line| is_skip(line)).count() - pairs.count()
}

/// What 512-byte sectors on a device that writes them efficiently pass: everything that applies to them.
#[test]
fn the_suite_passes_with_small_sectors() {
    let target = start_with(Authentication::None, SectorSize::Bytes512, 512);
    let passed = run_suite(&target, &[]);
    assert!(passed >= 170, "{passed}");
}

/// With several logical blocks for each physical block, more tests apply. One of them is wrong: it asks for the status
/// of block `i + 1`, and expects the answer for `i` plus the size of a physical block.
#[test]
fn the_suite_passes_with_large_physical_blocks() {
    let target = start_with(Authentication::None, SectorSize::Bytes512, 4096);
    let passed = run_suite(&target, &["Suite GetLBAStatus, Test UnmapSingle"]);
    assert!(passed >= 170, "{passed}");
}

#[test]
fn the_suite_passes_with_large_sectors() {
    let target = start(Authentication::None, SectorSize::Bytes4096);
    let passed = run_suite(&target, &[]);
    assert!(passed >= 165, "{passed}");
}

#[test]
fn qemu_reads_writes_and_discards() {
    let target = start(Authentication::None, SectorSize::Bytes512);
    let url = target.url(0);
    for command in [
        "write -P 7 1M 3M",
        "read -P 7 1M 3M",
        "write -z 2M 1M",
        "read -P 0 2M 1M",
        "discard 3M 512k",
        "read -P 0 3M 512k",
        "flush",
        "read -P 7 1M 1M",
    ] {
        let printed = succeed("qemu-io", &["-f", "raw", "-c", command, &url]);
        assert!(!printed.contains("failed"), "{command}: {printed}");
    }
    let map = succeed("qemu-img", &["map", "--output=json", "-f", "raw", &url]);
    assert!(
        map.contains("\"zero\": true") && map.contains("\"data\": true"),
        "{map}"
    );
    let (_, refused) = run("qemu-io", &["-f", "raw", "-c", "write -P 7 0 4k", &target.url(1)]);
    assert!(refused.contains("write protected"), "{refused}");
    succeed("qemu-io", &["-r", "-f", "raw", "-c", "read -P 0 0 4k", &target.url(1)]);
}

#[test]
fn libiscsi_authenticates_by_chap() {
    let user = ChapUser {
        name: "mary".to_owned(),
        secret: ChapSecret::new(b"a-secret-of-mary").unwrap(),
    };
    let authentication = Authentication::Chap {
        users: vec![user],
        target: None,
    };
    let target = start(authentication, SectorSize::Bytes512);
    let url = |user: &str| format!("iscsi://{user}@{}/{TARGET}/0", target.address);
    succeed("iscsi-inq", &[&url("mary%a-secret-of-mary")]);
    assert!(!run("iscsi-inq", &[&url("mary%wrong_secret_x")]).0);
    assert!(!run("iscsi-inq", &[&target.url(0)]).0);
}
