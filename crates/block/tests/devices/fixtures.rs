//! Every released version of a format stays readable: there is one fixture for each, and the list is complete.

use std::collections::BTreeSet;
use std::path::PathBuf;

use holdfast_block::conformance::contents;
use holdfast_block::{
    BITMAP_VERSION, BackingId, BlockDeviceMut, DirtyBitmap, MemoryDevice, OVERLAY_VERSION, OverlayDevice,
    OverlayOptions, SeededRandom,
};

const BITMAP_SIZE_BYTES: u64 = 10_000_001;
const BACKING_ID: BackingId = BackingId([7; 16]);

fn directory() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures")
}

fn fixture(name: &str) -> Vec<u8> {
    std::fs::read(directory().join(name)).unwrap()
}

/// Stored as runs: a few ranges, and the end of the device.
fn bitmap_runs() -> DirtyBitmap {
    let mut bitmap = DirtyBitmap::new(BITMAP_SIZE_BYTES, 4096).unwrap();
    bitmap.set(0..1);
    bitmap.set(100_000..2_000_000);
    bitmap.set(BITMAP_SIZE_BYTES - 1..BITMAP_SIZE_BYTES);
    bitmap
}

/// Stored as words: every second bit is set.
fn bitmap_words() -> DirtyBitmap {
    let mut bitmap = DirtyBitmap::new(BITMAP_SIZE_BYTES, 65_536).unwrap();
    for bit in (0..BITMAP_SIZE_BYTES / 65_536).step_by(2) {
        bitmap.set(bit * 65_536..bit * 65_536 + 1);
    }
    bitmap
}

fn backing() -> MemoryDevice {
    MemoryDevice::from_bytes(&SeededRandom::new(1).bytes(10_001))
}

/// The store of an overlay with clusters in all three states and a partial cluster, and the content read through it.
fn overlay() -> (Vec<u8>, Vec<u8>) {
    let backing = backing();
    let options = OverlayOptions {
        backing_id: BACKING_ID,
        cluster_size_bytes: 1024,
    };
    let store = MemoryDevice::new(options.store_size_bytes(10_001).unwrap());
    let overlay = OverlayDevice::create(&backing, &store, options).unwrap();
    overlay.write_at(b"holdfast", 1500).unwrap();
    overlay.write_zeroes(4000..7000).unwrap();
    overlay.write_at(b"end", 9998).unwrap();
    overlay.flush().unwrap();
    let bytes = contents(&overlay);
    drop(overlay);
    (store.to_bytes(), bytes)
}

fn fixtures() -> [(&'static str, Vec<u8>); 3] {
    [
        ("bitmap-v1-runs.bin", bitmap_runs().encode()),
        ("bitmap-v1-words.bin", bitmap_words().encode()),
        ("overlay-v1.bin", overlay().0),
    ]
}

#[test]
fn version_1_of_bitmaps_is_read() {
    for (name, expected) in [
        ("bitmap-v1-runs.bin", bitmap_runs()),
        ("bitmap-v1-words.bin", bitmap_words()),
    ] {
        assert_eq!(
            DirtyBitmap::decode(&fixture(name), BITMAP_SIZE_BYTES).unwrap(),
            expected
        );
    }
}

#[test]
fn version_1_of_overlays_is_read() {
    let store = MemoryDevice::from_bytes(&fixture("overlay-v1.bin"));
    let opened = OverlayDevice::open(backing(), store, BACKING_ID).unwrap();
    assert!(contents(&opened) == overlay().1);
}

/// The current code writes exactly the fixtures: a change of the layout without a new version fails here.
#[test]
fn the_current_code_writes_the_fixtures() {
    assert_eq!(
        (BITMAP_VERSION, OVERLAY_VERSION),
        (1, 1),
        "each version has a fixture and a test"
    );
    for (name, bytes) in fixtures() {
        assert!(fixture(name) == bytes, "{name}");
    }
}

#[test]
fn the_list_of_fixtures_is_complete() {
    let present: BTreeSet<String> = std::fs::read_dir(directory())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    let known = fixtures().map(|(name, _)| name.to_owned()).into();
    assert_eq!(present, known);
    for version in 1..=BITMAP_VERSION {
        assert!(
            present
                .iter()
                .any(|name| name.starts_with(&format!("bitmap-v{version}")))
        );
    }
    for version in 1..=OVERLAY_VERSION {
        assert!(
            present
                .iter()
                .any(|name| name.starts_with(&format!("overlay-v{version}")))
        );
    }
}

/// Writes the fixtures of the current versions; run it once for a new version:
/// `cargo test -p holdfast-block --test devices fixtures -- --ignored`
#[test]
#[ignore = "it writes the fixtures that the other tests read"]
#[expect(clippy::disallowed_methods, reason = "a fixture is committed, not synced")]
fn write_fixtures() {
    for (name, bytes) in fixtures() {
        let path = directory().join(name);
        if !path.exists() {
            std::fs::write(path, bytes).unwrap();
        }
    }
}
