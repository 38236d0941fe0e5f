//! Files that earlier versions packed must stay readable.

use std::io::Read as _;
use std::num::NonZero;
use std::sync::Arc;

use holdfast_archive::{PackedFile, Packing, Unpacked};
use holdfast_block::Threads;
use holdfast_block::{BlockDevice as _, MemoryDevice};

/// Their content: one number per line.
fn content() -> Vec<u8> {
    (0..300_000_u32)
        .flat_map(|number| format!("{number}\n").into_bytes())
        .collect()
}

#[test]
fn packed_streams_of_version_1_are_read() {
    let threads = Threads {
        count: NonZero::<usize>::MIN,
        load_max: None,
    };
    for (packing, bytes) in [
        (Packing::Gzip, &include_bytes!("fixtures/packed-1.gz")[..]),
        (Packing::Zstd, &include_bytes!("fixtures/packed-1.zst")[..]),
    ] {
        let file = PackedFile::open(Arc::new(MemoryDevice::from_bytes(bytes))).unwrap();
        assert_eq!((file.packing(), file.size_bytes()), (packing, content().len() as u64));
        file.check(NonZero::<usize>::MIN, &mut |_| Ok(())).unwrap();
        let mut found = vec![0; content().len()];
        file.read_at(&mut found, 0).unwrap();
        assert!(found == content());
        let mut stream = Unpacked::new(Box::new(bytes), threads).unwrap();
        found.clear();
        stream.read_to_end(&mut found).unwrap();
        assert!(found == content());
    }
}
