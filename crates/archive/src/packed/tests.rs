use std::io::{Read, Write};
use std::num::NonZero;
use std::sync::{Arc, Mutex};

use holdfast_block::{BlockDevice as _, MemoryDevice, SeededRandom};

use super::{PackOptions, PackedFile, Packer, pack};
use crate::in_order::Threads;
use crate::unpack::{Packing, Unpacked};
use crate::{Error, Result};

const THREADS: Threads = Threads {
    count: NonZero::new(3).unwrap(),
    load_max: None,
};

#[derive(Clone, Default)]
struct Shared(Arc<Mutex<Vec<u8>>>);

impl Write for Shared {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Half of it compresses.
fn stream(length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    let mut random = SeededRandom::new(7);
    for (number, chunk) in bytes.chunks_mut(1000).enumerate() {
        if number % 2 == 0 {
            random.fill(chunk);
        }
    }
    bytes
}

fn packed(bytes: &[u8], packing: Packing) -> Vec<u8> {
    let shared = Shared::default();
    let options = PackOptions {
        packing,
        level: None,
        threads: THREADS,
    };
    let report = pack(bytes, Box::new(shared.clone()), options, &mut |_| Ok(())).unwrap();
    let written = shared.0.lock().unwrap().clone();
    assert_eq!(report.unpacked_bytes, bytes.len() as u64);
    assert_eq!(report.written_bytes, written.len() as u64);
    written
}

fn unpacked(bytes: &[u8]) -> std::io::Result<(Packing, Vec<u8>)> {
    let mut stream = Unpacked::new(Box::new(std::io::Cursor::new(bytes.to_vec())), THREADS)?;
    let mut found = Vec::new();
    stream.read_to_end(&mut found)?;
    assert_eq!(stream.read(&mut [0]).unwrap(), 0, "the end stays the end");
    Ok((stream.packing(), found))
}

fn open(bytes: &[u8]) -> Result<PackedFile> {
    PackedFile::open(Arc::new(MemoryDevice::from_bytes(bytes)))
}

#[test]
fn what_is_packed_is_unpacked_by_us_and_by_any_other() {
    for length in [0, 1, 999, 1 << 20, (1 << 20) + 1, 9_700_000] {
        let bytes = stream(length);
        for packing in [Packing::Gzip, Packing::Zstd] {
            let file = packed(&bytes, packing);
            assert_eq!(unpacked(&file).unwrap(), (packing, bytes.clone()), "{length}");
            let mut other = Vec::new();
            match packing {
                Packing::Gzip => flate2::read::MultiGzDecoder::new(&file[..])
                    .read_to_end(&mut other)
                    .unwrap(),
                _ => zstd::stream::read::Decoder::new(&file[..])
                    .unwrap()
                    .read_to_end(&mut other)
                    .unwrap(),
            };
            assert!(other == bytes, "{packing:?} {length}");
        }
        assert_eq!(unpacked(&bytes).unwrap(), (Packing::None, bytes));
    }
}

#[test]
fn what_others_packed_in_one_piece_is_unpacked() {
    let bytes = stream(5_000_000);
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gzip.write_all(&bytes).unwrap();
    let gzip = gzip.finish().unwrap();
    assert_eq!(unpacked(&gzip).unwrap(), (Packing::Gzip, bytes.clone()));
    let zstd = zstd::stream::encode_all(&bytes[..], 1).unwrap();
    assert_eq!(unpacked(&zstd).unwrap(), (Packing::Zstd, bytes.clone()));
    // Ours, and behind it another's.
    for (packing, other) in [(Packing::Gzip, gzip), (Packing::Zstd, zstd)] {
        let both = [packed(&bytes, packing), other.clone()].concat();
        assert_eq!(unpacked(&both).unwrap().1, [&bytes[..], &bytes].concat());
        unpacked(&other[..other.len() - 3]).unwrap_err();
    }
}

#[test]
fn a_packed_stream_that_is_cut_off_or_changed_is_an_error() {
    let bytes = stream(2_500_000);
    for packing in [Packing::Gzip, Packing::Zstd] {
        let file = packed(&bytes, packing);
        let data_bytes = usize::try_from(open(&file).unwrap().index().packed_bytes()).unwrap();
        for length in (5..data_bytes).step_by(100_003) {
            unpacked(&file[..length]).unwrap_err();
        }
        for at in (30..data_bytes).step_by(150_001) {
            let mut changed = file.clone();
            changed[at] ^= 0x10;
            assert!(unpacked(&changed).is_err(), "{packing:?} {at}");
            let error = open(&changed)
                .unwrap()
                .check(THREADS.count, &mut |_| Ok(()))
                .unwrap_err();
            assert!(
                matches!(
                    error,
                    Error::Corrupt {
                        what: "packed block",
                        ..
                    }
                ),
                "{error}"
            );
        }
    }
}

/// A cut between two blocks, each of which is whole by itself, looks like an end.
#[test]
fn a_packed_stream_that_lacks_its_index_is_not_taken_for_whole() {
    let bytes = stream(9_000_000);
    let file = packed(&bytes, Packing::Gzip);
    let index = open(&file).unwrap();
    let mut end = 0;
    for entry in index.index().entries() {
        end += usize::try_from(entry.packed_bytes).unwrap();
        let error = unpacked(&file[..end]).unwrap_err();
        assert!(error.to_string().contains("the index"), "{error}");
    }
    let two = [&file[..], &file[..end]].concat();
    unpacked(&two).unwrap_err();
    assert_eq!(
        unpacked(&[&file[..], &file].concat()).unwrap().1,
        [&bytes[..], &bytes].concat()
    );

    // Nothing says so of a frame of zstd: only its length makes suspicious.
    let file = packed(&bytes, Packing::Zstd);
    let first = usize::try_from(open(&file).unwrap().index().entries()[0].packed_bytes).unwrap();
    for (length, may_be_cut) in [(first, true), (file.len(), false)] {
        let mut stream = Unpacked::new(Box::new(std::io::Cursor::new(file[..length].to_vec())), THREADS).unwrap();
        stream.read_to_end(&mut Vec::new()).unwrap();
        assert_eq!(stream.may_be_cut(), may_be_cut, "{length}");
    }
}

#[test]
fn every_place_is_read_by_the_index() {
    let bytes = stream(9_700_000);
    let mut random = SeededRandom::new(3);
    for packing in [Packing::Gzip, Packing::Zstd] {
        let file = open(&packed(&bytes, packing)).unwrap();
        assert_eq!((file.packing(), file.size_bytes()), (packing, bytes.len() as u64));
        for _ in 0..50 {
            let start = usize::try_from(random.below(9_000_000)).unwrap();
            let length = usize::try_from(random.below(700_000)).unwrap();
            let mut found = vec![0; length];
            file.read_at(&mut found, start as u64).unwrap();
            assert!(found == bytes[start..start + length]);
        }
        let report = file.check(THREADS.count, &mut |_| Ok(())).unwrap();
        assert_eq!(report.unpacked_bytes, bytes.len() as u64);
        assert_eq!(report.block_count, file.index().entries().len() as u64);
        file.check(THREADS.count, &mut |_| Err(std::io::ErrorKind::Interrupted.into()))
            .unwrap_err();
    }
}

#[test]
fn an_index_that_is_not_there_or_lies_is_refused() {
    let bytes = stream(1_500_000);
    for packing in [Packing::Gzip, Packing::Zstd] {
        let file = packed(&bytes, packing);
        let end = usize::try_from(open(&file).unwrap().index().packed_bytes()).unwrap();
        assert!(matches!(open(&file[..end]), Err(Error::NoIndex)));
        assert!(matches!(open(&file[..file.len() - 1]), Err(Error::NoIndex)));
        for at in end..file.len() {
            let mut changed = file.clone();
            changed[at] ^= 1;
            // What is not believed is refused; what is believed is found out when it is read.
            if let Ok(file) = open(&changed)
                && file.index() != open(&packed(&bytes, packing)).unwrap().index()
            {
                file.check(THREADS.count, &mut |_| Ok(())).unwrap_err();
            }
        }
    }
    assert!(matches!(open(&bytes), Err(Error::NoIndex)));
    assert!(matches!(open(b""), Err(Error::NoIndex)));
}

#[test]
fn the_index_of_a_long_stream_takes_several_members() {
    let mut index = super::PackedIndex::default();
    for number in 0..20_000 {
        index.push(100 + number % 7, 1000, number);
    }
    for packing in [Packing::Gzip, Packing::Zstd] {
        let start = usize::try_from(index.packed_bytes()).unwrap();
        let mut file = vec![0; start];
        file.extend(index.encode(packing).unwrap());
        let read = |offset: u64, count: usize| {
            let start = usize::try_from(offset).unwrap();
            Ok(file[start..start + count].to_vec())
        };
        let found = super::PackedIndex::read(packing, file.len() as u64, &mut { read }).unwrap();
        assert_eq!(found, index);
    }
}

#[test]
fn a_reader_that_goes_away_ends_the_packing() {
    struct Full;
    impl Write for Full {
        fn write(&mut self, _: &[u8]) -> std::io::Result<usize> {
            Err(std::io::ErrorKind::StorageFull.into())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let options = |level| PackOptions {
        packing: Packing::Zstd,
        level,
        threads: THREADS,
    };
    let mut packer = Packer::new(Box::new(Full), options(None)).unwrap();
    let error = std::io::copy(&mut std::io::repeat(7).take(1 << 30), &mut packer).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::StorageFull);
    assert!(matches!(
        Packer::new(Box::new(Full), options(Some(30))),
        Err(Error::InvalidOption { .. })
    ));
}
