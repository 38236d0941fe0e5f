//! The parser of requests for fuzzing; see [`holdfast_block::hostile`].

use std::fs::File;
use std::sync::{Arc, OnceLock};

use holdfast_block::hostile::Outcome;
use holdfast_block::{BlockDeviceMut as _, MemoryDevice};
use rustix::fs::MemfdFlags;

use super::chain::{DescriptorTable, IndirectTables, Segment, byte_count, follow};
use super::config::WriteCache;
use super::execute::{DiskRequest, load_descriptor};
use super::export::{VhostUserExport, VhostUserExportOptions};
use super::memory::{GuestMap, RegionPlace};
use crate::server::export_device::ExportDevice;

const MEMORY_BYTES: usize = 16 << 10;
const DISK_BYTES: u64 = 64 << 10;
/// The ring is at the start of the memory.
const RING_SIZE: u16 = 16;

/// The memory of a guest. Fuzzers use one thread each.
fn guest_map() -> Arc<GuestMap> {
    thread_local! {
        static MAP: OnceLock<Arc<GuestMap>> = const { OnceLock::new() };
    }
    MAP.with(|map| Arc::clone(map.get_or_init(|| Arc::new(new_map()))))
}

fn new_map() -> GuestMap {
    let file = rustix::fs::memfd_create("guest", MemfdFlags::CLOEXEC).map(File::from);
    let file = file.expect("memory for a test");
    file.set_len(MEMORY_BYTES as u64).expect("memory for a test");
    let place = RegionPlace {
        guest_address: 0,
        size_bytes: MEMORY_BYTES as u64,
        user_address: 1 << 40,
        file_offset: 0,
    };
    let map = GuestMap::default().with(place, file);
    map.expect("memory for a test")
}

/// The memory of a guest: a table of descriptors, and what they point to. The first byte chooses the device.
pub(crate) fn requests(bytes: &[u8]) -> Outcome {
    let Some((first, contents)) = bytes.split_first() else {
        return Outcome::Refused;
    };
    let map = guest_map();
    let mut memory = vec![0; MEMORY_BYTES];
    for (place, byte) in memory.iter_mut().zip(contents) {
        *place = *byte;
    }
    let whole = Segment {
        address: 0,
        length: u32::try_from(MEMORY_BYTES).expect("a small memory"),
    };
    assert_eq!(map.scatter(&[whole], 0, &memory), Ok(()));
    let device = Arc::new(MemoryDevice::new(DISK_BYTES));
    device.write_at(&[1; 512], 512).expect("inside the device");
    let export_device = match first & 1 {
        0 => ExportDevice::Writable(device),
        _ => ExportDevice::ReadOnly(device),
    };
    let export = VhostUserExport::new(export_device, VhostUserExportOptions::new("disk"));
    let cache = match first & 2 {
        0 => WriteCache::WriteBack,
        _ => WriteCache::WriteThrough,
    };
    let table = DescriptorTable {
        address: 0,
        descriptor_count: RING_SIZE,
    };
    let mut outcome = Outcome::Refused;
    let mut piece = vec![0; 4096];
    for head in 0..RING_SIZE {
        let Ok(chain) = follow(table, head, IndirectTables::Negotiated, &load_descriptor(&map)) else {
            continue;
        };
        let writable_bytes = byte_count(&chain.writable);
        if let Ok(request) = DiskRequest::parse(head, chain, Arc::clone(&map), &export) {
            let executed = request.execute(&export, cache, &mut piece);
            assert!(
                u64::from(executed.written_bytes) <= writable_bytes,
                "more than the guest has asked for"
            );
            assert!(
                executed.error.is_none(),
                "the device does not fail: {:?}",
                executed.error
            );
            outcome = Outcome::Decoded;
        }
    }
    outcome
}

/// Valid memories: name of the parser, name of the seed, bytes.
pub(crate) fn seeds() -> Vec<(&'static str, &'static str, Vec<u8>)> {
    vec![
        ("vhost_user_request", "requests", requests_seed(0)),
        ("vhost_user_request", "write_through", requests_seed(2)),
        ("vhost_user_request", "read_only", requests_seed(1)),
        ("vhost_user_request", "indirect", indirect_seed()),
    ]
}

fn descriptor(address: u64, length: u32, flags: u16, next: u16) -> Vec<u8> {
    [
        &address.to_le_bytes()[..],
        &length.to_le_bytes(),
        &flags.to_le_bytes(),
        &next.to_le_bytes(),
    ]
    .concat()
}

fn header(kind: u32, sector: u64) -> Vec<u8> {
    [&kind.to_le_bytes()[..], &[0; 4], &sector.to_le_bytes()].concat()
}

/// Headers at 1024, data at 2048, the status at 4000.
fn requests_seed(first: u8) -> Vec<u8> {
    let mut memory = Vec::new();
    let requests: [(u32, u64, u32, u16); 5] = [
        (0, 1, 1024, 2),
        (1, 2, 512, 0),
        (4, 0, 0, 0),
        (8, 0, 20, 2),
        (13, 0, 32, 0),
    ];
    for (index, (_, _, length, flags)) in requests.iter().enumerate() {
        let index = u16::try_from(index * 3).expect("few requests");
        let place = 1024 + u64::from(index / 3) * 16;
        memory.extend(descriptor(place, 16, 1, index + 1));
        memory.extend(descriptor(2048, *length, 1 | flags, index + 2));
        memory.extend(descriptor(4000, 1, 2, 0));
    }
    memory.resize(1024, 0);
    memory.extend(requests.iter().flat_map(|(kind, sector, ..)| header(*kind, *sector)));
    memory.resize(2048, 0);
    // Two ranges, of which the first may be unmapped.
    memory.extend([header(0, 0), vec![8, 0, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 1, 0, 0, 0]].concat());
    [vec![first], memory].concat()
}

fn indirect_seed() -> Vec<u8> {
    let mut memory = descriptor(512, 48, 4, 0);
    memory.resize(512, 0);
    memory.extend(descriptor(1024, 16, 1, 1));
    memory.extend(descriptor(2048, 4096, 3, 2));
    memory.extend(descriptor(4000, 1, 2, 0));
    memory.resize(1024, 0);
    memory.extend(header(0, 8));
    [vec![0], memory].concat()
}
