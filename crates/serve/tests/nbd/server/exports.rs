//! The exports of a server: opened on demand, with extents, bitmaps and data.

use std::ops::Range;
use std::sync::{Arc, Mutex};

use holdfast_block::{BlockDeviceMut as _, DirtyBitmap, MemoryDevice, Result, SeededRandom, to_usize};
use holdfast_serve::nbd::{Export, ExportDevice, ExportEntry, Exports, FixedExports};

use super::{SIZE, writable};
use crate::raw::{Raw, Style, context_query, info_query, string, u32_at, u64_at};
use crate::servers::OurServer;

/// Opens exports on demand, and records their names.
#[derive(Clone, Default)]
struct Lazy(Arc<Mutex<Vec<String>>>);

impl Exports for Lazy {
    fn list(&self) -> Vec<ExportEntry> {
        let entry = |name: &str| ExportEntry {
            name: name.to_owned(),
            description: "a snapshot".to_owned(),
        };
        vec![entry("monday/disk"), entry("broken")]
    }

    fn open(&self, name: &str) -> Result<Option<Arc<Export>>> {
        self.0.lock().unwrap().push(name.to_owned());
        match name {
            "monday/disk" => {
                let device = Arc::new(MemoryDevice::from_bytes(&[7; 1000]));
                Ok(Some(Arc::new(Export::new(name, ExportDevice::ReadOnly(device)))))
            }
            "broken" => Err(holdfast_block::Error::io("read", 0, std::io::Error::other("lost"))),
            _ => Ok(None),
        }
    }
}

#[test]
fn an_export_is_opened_on_demand_once_for_each_client() {
    let lazy = Lazy::default();
    let server = OurServer::start(lazy.clone());
    let mut raw = Raw::connect(&server.socket());
    raw.say(&3_u32.to_be_bytes());
    let list = raw.option(3, &[]).unwrap();
    assert_eq!(list[0], (2, [string("monday/disk"), b"a snapshot".to_vec()].concat()));
    assert_eq!(list.len(), 3);
    assert!(lazy.0.lock().unwrap().is_empty(), "a list opens nothing");
    assert_eq!(raw.option(6, &info_query("broken", &[])).unwrap()[0].0, 0x8000_0006);
    server.wait_for_event(&["OpenFailed", "broken", "lost"]);
    raw.agree_on(Style::Structured).unwrap();
    for option in [6, 10, 7] {
        let data = match option {
            10 => context_query("monday/disk", &["base:allocation"]),
            _ => info_query("monday/disk", &[0]),
        };
        assert_eq!(raw.option(option, &data).unwrap().last().unwrap().0, 1);
    }
    assert_eq!(*lazy.0.lock().unwrap(), ["broken", "monday/disk"]);
    assert_eq!(raw.read(0, 1000), [7; 1000]);
    for kind in [1, 4, 6] {
        let payload: &[u8] = if kind == 1 { &[0; 512] } else { &[] };
        assert_eq!(raw.ask(0, kind, 0, 512, payload).unwrap().error, 1, "it is read-only");
    }
}

#[test]
fn holes_and_changes_are_reported() {
    let device = MemoryDevice::new(1 << 20);
    device.write_at(&vec![1; 65_536], 131_072).unwrap();
    let mut bitmap = DirtyBitmap::new(1 << 20, 65_536).unwrap();
    bitmap.set(0..1);
    bitmap.set(200_000..200_001);
    let export = writable(device).with_bitmap("since-monday", Arc::new(bitmap));
    let server = OurServer::start(FixedExports::new([export]));
    let contexts = ["base:allocation", "qemu:dirty-bitmap:since-monday"];
    for style in [Style::Structured, Style::Extended] {
        let mut raw = Raw::enter(&server.socket(), "disk", style, &contexts).unwrap();
        let answer = raw.ask(0, 0, 0, 1 << 20, &[]).unwrap();
        let kinds: Vec<u16> = answer.chunks.iter().map(|(kind, _)| *kind).collect();
        assert_eq!(kinds, [2, 1, 2], "hole, data, hole");
        let answer = raw.ask(0, 7, 0, 1 << 20, &[]).unwrap();
        let extents = |number: usize| -> Vec<(u64, u64)> {
            let payload = &answer.chunks[number].1;
            if style == Style::Extended {
                let extents = payload[8..].chunks(16);
                return extents.map(|it| (u64_at(it, 0), u64_at(it, 8))).collect();
            }
            let extents = payload[4..].chunks(8);
            extents.map(|it| (u32_at(it, 0).into(), u32_at(it, 4).into())).collect()
        };
        assert_eq!(extents(0), [(131_072, 3), (65_536, 0), (851_968, 3)]);
        assert_eq!(extents(1), [(65_536, 1), (131_072, 0), (65_536, 1), (786_432, 0)]);
        assert_eq!(answer.chunks.len(), 2);
    }
    let mut raw = Raw::enter(&server.socket(), "disk", Style::Extended, &contexts).unwrap();
    let only_second = [(1_u64 << 20).to_be_bytes().as_slice(), &1_u32.to_be_bytes()].concat();
    let answer = raw.ask(32, 7, 0, 12, &only_second).unwrap();
    assert_eq!(
        (answer.error, answer.chunks.len(), u32_at(&answer.chunks[0].1, 0)),
        (0, 1, 1)
    );
    let twice = [only_second.as_slice(), &1_u32.to_be_bytes()].concat();
    assert_eq!(raw.ask(32, 7, 0, 16, &twice).unwrap().error, 22);
}

/// Compares random requests over several connections, one region each, with a vector of bytes; with and without
/// workers, because the first requests go to workers and later ones do not.
#[test]
fn an_export_behaves_like_a_vector_of_bytes() {
    let seed = holdfast_block::conformance::test_seed();
    let server = OurServer::start(FixedExports::new([writable(MemoryDevice::new(SIZE))]));
    let socket = server.socket();
    let styles = [Style::Simple, Style::Structured, Style::Extended];
    let part = SIZE / 3;
    let threads: Vec<_> = (0_u64..)
        .zip(styles)
        .map(|(number, style)| {
            let socket = socket.clone();
            std::thread::spawn(move || {
                let raw = Raw::enter(&socket, "disk", style, &[]).unwrap();
                exercise(
                    raw,
                    SeededRandom::new(seed ^ number),
                    number * part..(number + 1) * part,
                )
            })
        })
        .collect();
    let mut expected: Vec<u8> = threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect();
    expected.resize(to_usize(SIZE), 0);
    let mut raw = Raw::enter(&socket, "disk", Style::Structured, &[]).unwrap();
    assert!(raw.read(0, to_usize(SIZE)) == expected, "after the last byte");
}

fn exercise(mut raw: Raw, mut random: SeededRandom, region: Range<u64>) -> Vec<u8> {
    let size = region.end - region.start;
    let mut model = vec![0; to_usize(size)];
    let with_payload = if raw.style == Style::Extended { 32 } else { 0 };
    for _ in 0..400 {
        let length_max = if random.one_in(8) { size } else { 5000 };
        let range = random.range_within(size, length_max);
        let (offset, length) = (region.start + range.start, range.end - range.start);
        let place = to_usize(range.start)..to_usize(range.end);
        let durable = u16::from(random.one_in(4));
        match random.below(4) {
            0 => {
                let data = random.bytes(place.len());
                let answer = raw.ask(durable | with_payload, 1, offset, length, &data).unwrap();
                assert_eq!(answer.error, 0);
                model[place].copy_from_slice(&data);
            }
            1 => {
                let no_hole = if random.one_in(2) { 2 } else { 0 };
                assert_eq!(raw.ask(durable | no_hole, 6, offset, length, &[]).unwrap().error, 0);
                model[place].fill(0);
            }
            _ => assert!(
                raw.read(offset, place.len()) == model[place],
                "{length} bytes at {offset}"
            ),
        }
    }
    model
}
