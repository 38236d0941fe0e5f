//! Clients of other projects with Holdfast's server.

use std::sync::Arc;

use holdfast_block::{BlockDeviceMut as _, DirtyBitmap, MemoryDevice, SeededRandom};
use holdfast_serve::nbd::{Export, ExportDevice, FixedExports, ZeroSpeed};

use crate::servers::{OurServer, run, text};

const SIZE: u64 = (9 << 20) + 512;

/// A disk with data, holes and a bitmap, and the same disk as a read-only export.
fn server() -> (Arc<MemoryDevice>, OurServer) {
    let device = Arc::new(MemoryDevice::new(SIZE));
    let mut random = SeededRandom::new(5);
    for start in [0, 3 << 20, SIZE - 5000] {
        device.write_at(&random.bytes(5000), start).unwrap();
    }
    let mut bitmap = DirtyBitmap::new(SIZE, 65_536).unwrap();
    bitmap.set(3 << 20..(3 << 20) + 1);
    let disk = Export::new("disk", ExportDevice::Writable(Arc::clone(&device) as _))
        .with_description("a disk for tests")
        .with_bitmap("monday", Arc::new(bitmap))
        .with_zero_speed(ZeroSpeed::Quick);
    let frozen = Export::new("frozen", ExportDevice::ReadOnly(Arc::clone(&device) as _));
    (device, OurServer::start(FixedExports::new([disk, frozen])))
}

#[test]
fn libnbd_describes_and_copies_an_export() {
    let (device, server) = server();
    let uri = server.uri("disk");
    let info = run("nbdinfo", &[&uri]);
    for line in [
        "export-size: 9437696",
        "a disk for tests",
        "base:allocation",
        "qemu:dirty-bitmap:monday",
        "can_multi_conn: true",
        "can_fast_zero: true",
        "is_read_only: false",
        "block_size_maximum: 33554432",
    ] {
        assert!(info.contains(line), "{line}: {info}");
    }
    assert!(run("nbdinfo", &[&server.uri("frozen")]).contains("is_read_only: true"));
    let list = run("nbdinfo", &["--list", &server.uri("")]);
    assert!(
        list.contains("export=\"disk\"") && list.contains("export=\"frozen\""),
        "{list}"
    );
    let map = run("nbdinfo", &["--map", &uri]);
    assert_eq!(
        words(map.lines().nth(1).unwrap()),
        ["8192", "3137536", "3", "hole,zero"]
    );
    let changes = run("nbdinfo", &["--map=qemu:dirty-bitmap:monday", &uri]);
    assert_eq!(
        words(changes.lines().nth(1).unwrap()),
        ["3145728", "65536", "1", "dirty"]
    );

    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("copy");
    run("nbdcopy", &[&uri, text(&file)]);
    assert!(std::fs::read(&file).unwrap() == device.to_bytes());
    // Overwritten ranges are restored from the copy.
    let before = device.to_bytes();
    device.write_at(&vec![9; 100_000], 2 << 20).unwrap();
    run("nbdcopy", &["--flush", text(&file), &uri]);
    assert!(device.to_bytes() == before);
}

#[test]
fn qemu_reads_compares_and_converts_an_export() {
    let (device, server) = server();
    let uri = server.uri("disk");
    let folder = tempfile::tempdir().unwrap();
    let (raw, qcow2) = (folder.path().join("raw"), folder.path().join("qcow2"));
    run(
        "qemu-img",
        &[
            "convert",
            "-f",
            "raw",
            "-O",
            "qcow2",
            "-W",
            "-m",
            "8",
            &uri,
            text(&qcow2),
        ],
    );
    run("qemu-img", &["convert", "-f", "raw", "-O", "raw", &uri, text(&raw)]);
    assert!(std::fs::read(&raw).unwrap() == device.to_bytes());
    let same = run("qemu-img", &["compare", "-f", "raw", "-F", "qcow2", &uri, text(&qcow2)]);
    assert!(same.contains("identical"), "{same}");
    let map = run("qemu-img", &["map", "-f", "raw", "--output=json", &uri]);
    assert!(map.contains("\"start\": 8192, \"length\": 3137536"), "{map}");
    device.write_at(&[3; 10], 1 << 20).unwrap();
    run(
        "qemu-img",
        &["convert", "-n", "-f", "raw", "-O", "raw", text(&raw), &uri],
    );
    assert!(std::fs::read(&raw).unwrap() == device.to_bytes(), "written back");
}

#[test]
fn qemu_writes_to_an_export() {
    let (device, server) = server();
    let before = device.to_bytes();
    let commands = [
        "write -P 7 1M 300k",
        "read -P 7 1M 300k",
        "write -f -P 8 513k 1k",
        "write -z 1M 100k",
        "write -z -u 1200k 4k",
        "read -P 0 1M 100k",
        "discard 4M 1M",
        "aio_write -P 5 6M 64k",
        "aio_read -P 0 7M 64k",
        "aio_flush",
        "flush",
    ];
    let mut arguments = vec!["-f", "raw"];
    for command in commands {
        arguments.extend(["-c", command]);
    }
    let uri = server.uri("disk");
    arguments.push(&uri);
    let printed = run("qemu-io", &arguments);
    assert!(!printed.contains("rror") && !printed.contains("ailed"), "{printed}");
    let mut expected = before;
    let mut fill = |start: usize, length: usize, byte: u8| expected[start..start + length].fill(byte);
    fill(1 << 20, 300 << 10, 7);
    fill(513 << 10, 1 << 10, 8);
    fill(1 << 20, 100 << 10, 0);
    fill(1200 << 10, 4 << 10, 0);
    fill(4 << 20, 1 << 20, 0);
    fill(6 << 20, 64 << 10, 5);
    assert!(device.to_bytes() == expected);
}

#[test]
fn libnbd_uses_every_command() {
    let (device, server) = server();
    let script = r#"
import nbd
h = nbd.NBD()
h.add_meta_context(nbd.CONTEXT_BASE_ALLOCATION)
h.add_meta_context("qemu:dirty-bitmap:monday")
h.connect_uri(URI)
assert h.get_size() == 9437696
assert h.can_meta_context("qemu:dirty-bitmap:monday")
buf = b"x" * 70000
h.pwrite(buf, 5 << 20, nbd.CMD_FLAG_FUA)
assert h.pread(70000, 5 << 20) == buf
assert h.pread(512, h.get_size() - 512) == h.pread_structured(512, h.get_size() - 512, lambda *a: 0)
h.zero(1000, 5 << 20, nbd.CMD_FLAG_FAST_ZERO)
h.zero(1000, (5 << 20) + 1000, nbd.CMD_FLAG_NO_HOLE)
assert h.pread(2001, 5 << 20) == bytearray(2000) + b"x"
h.trim(4096, 6 << 20)
h.cache(65536, 0)
h.flush()
seen = {}
h.block_status(h.get_size(), 0, lambda name, offset, entries, err: seen.update({name: list(entries)}))
assert sum(seen["base:allocation"][0::2]) == h.get_size(), seen
assert seen["qemu:dirty-bitmap:monday"] == [3145728, 0, 65536, 1, 6226432, 0], seen
chunks = []
h.pread_structured(1 << 20, 1 << 20, lambda b, o, s, e: chunks.append(s))
assert chunks == [nbd.READ_HOLE], chunks
h.set_strict_mode(0)
for wrong in (lambda: h.pread(1, h.get_size()), lambda: h.pwrite(b"1", h.get_size()), lambda: h.zero(1, h.get_size())):
    try:
        wrong()
        raise SystemExit("it was accepted")
    except nbd.Error:
        pass
assert h.pread(2001, 5 << 20) == bytearray(2000) + b"x"
h.shutdown()
"#;
    let script = script.replace("URI", &format!("{:?}", server.uri("disk")));
    // The Python of the system has the module; another one in the path may not.
    run("/usr/bin/python3", &["-c", &script]);
    assert_eq!(device.to_bytes()[(5 << 20) + 2000], b'x');
}

fn words(line: &str) -> Vec<&str> {
    line.split_whitespace().collect()
}
