use std::io::{Read, Write};
use std::num::NonZero;
use std::sync::{Arc, Mutex};

use holdfast_block::{BlockDevice as _, MemoryDevice, SeededRandom, Threads};

use super::{PackOptions, PackedFile, Packer, gzip, pack};
use crate::packed::frame::Packing;
use crate::packed::unpack::Unpacked;
use crate::{Error, Result};

const THREADS: Threads = Threads {
    count: NonZero::new(3).unwrap(),
    load_max: None,
};

#[derive(Clone, Default)]
struct SharedBuffer(Arc<Mutex<Vec<u8>>>);

impl Write for SharedBuffer {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// A stream, half of which is compressible.
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
    let shared = SharedBuffer::default();
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
    assert_eq!(
        stream.read(&mut [0]).unwrap(),
        0,
        "reading after the end returns nothing"
    );
    Ok((stream.packing(), found))
}

fn open(bytes: &[u8]) -> Result<PackedFile> {
    PackedFile::open(Arc::new(MemoryDevice::from_bytes(bytes)))
}

#[test]
fn packed_streams_are_unpacked_by_us_and_by_other_programs() {
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
fn single_frame_streams_of_other_programs_are_unpacked() {
    let bytes = stream(5_000_000);
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gzip.write_all(&bytes).unwrap();
    let gzip = gzip.finish().unwrap();
    assert_eq!(unpacked(&gzip).unwrap(), (Packing::Gzip, bytes.clone()));
    let zstd = zstd::stream::encode_all(&bytes[..], 1).unwrap();
    assert_eq!(unpacked(&zstd).unwrap(), (Packing::Zstd, bytes.clone()));
    // A stream of Holdfast, followed by one of another program.
    for (packing, other) in [(Packing::Gzip, gzip), (Packing::Zstd, zstd)] {
        let both = [packed(&bytes, packing), other.clone()].concat();
        assert_eq!(unpacked(&both).unwrap().1, [&bytes[..], &bytes].concat());
        unpacked(&other[..other.len() - 3]).unwrap_err();
    }
}

fn xz(bytes: &[u8], dictionary_bytes: u32) -> Vec<u8> {
    let mut options = liblzma::stream::LzmaOptions::new_preset(1).unwrap();
    options.dict_size(dictionary_bytes);
    let mut filters = liblzma::stream::Filters::new();
    filters.lzma2(&options);
    let encoder = liblzma::stream::Stream::new_stream_encoder(&filters, liblzma::stream::Check::Crc64).unwrap();
    let mut packed = Vec::new();
    liblzma::bufread::XzEncoder::new_stream(bytes, encoder)
        .read_to_end(&mut packed)
        .unwrap();
    packed
}

#[test]
fn streams_of_xz_are_unpacked() {
    let bytes = stream(3_000_000);
    let file = xz(&bytes, 1 << 20);
    assert_eq!(unpacked(&file).unwrap(), (Packing::Xz, bytes.clone()));
    // Several streams, with the padding that the format permits.
    let both = [&file[..], &[0; 8], &file].concat();
    assert_eq!(unpacked(&both).unwrap().1, [&bytes[..], &bytes].concat());
    assert_eq!(unpacked(&xz(&[], 4096)).unwrap(), (Packing::Xz, Vec::new()));
    for length in (5..file.len()).step_by(50_003).chain([file.len() - 1]) {
        let error = unpacked(&file[..length]).unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::UnexpectedEof, "{length}: {error}");
        assert!(error.to_string().contains("was cut off"), "{length}: {error}");
    }
    for at in (5..file.len()).step_by(75_001) {
        let mut changed = file.clone();
        changed[at] ^= 0x10;
        assert!(unpacked(&changed).is_err(), "{at}");
    }
    let error = unpacked(&[&file[..], b"what is not of this format"].concat()).unwrap_err();
    assert!(error.to_string().contains("is damaged"), "{error}");
}

#[test]
fn a_stream_of_xz_that_takes_too_much_memory_is_refused_with_advice() {
    let mut file = xz(&stream(1000), 1 << 20);
    // The dictionary size of the first filter of the block header, which has a checksum: 1 MiB becomes 768 MiB.
    let header = 12..24;
    assert_eq!(file[header.start + 4], 16);
    file[header.start + 4] = 35;
    let checksum = libdeflater::crc32(&file[header.start..header.end - 4]);
    file[header.end - 4..header.end].copy_from_slice(&checksum.to_le_bytes());
    let error = unpacked(&file).unwrap_err();
    assert!(error.to_string().contains("xz -dc FILE"), "{error}");
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
            let file = open(&changed).unwrap();
            let error = file.read_at(&mut vec![0; bytes.len()], 0).unwrap_err();
            assert!(matches!(error, holdfast_block::Error::Layer(_)), "{error}");
        }
    }
}

/// Without its index, a stream that is truncated between two blocks looks complete.
#[test]
fn a_packed_stream_without_its_index_is_an_error() {
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

    // Frames of zstd have no mark of Holdfast: only their length is suspicious.
    let file = packed(&bytes, Packing::Zstd);
    let first = usize::try_from(open(&file).unwrap().index().entries()[0].packed_bytes).unwrap();
    let other = packed(&bytes[7..], Packing::Zstd);
    let full = packed(&bytes[..8 << 20], Packing::Zstd);
    for (file, may_be_cut) in [
        (file[..first].to_vec(), true),
        (file.clone(), false),
        ([&file[..], &file].concat(), false),
        ([&file[..], &file[..first]].concat(), true),
        // A truncated stream, followed by another one.
        ([&file[..first], &other].concat(), true),
        // Blocks of full length with their index are complete.
        ([&full[..], &full].concat(), false),
    ] {
        let mut stream = Unpacked::new(Box::new(std::io::Cursor::new(file.clone())), THREADS).unwrap();
        stream.read_to_end(&mut Vec::new()).unwrap();
        assert_eq!(stream.may_be_cut(), may_be_cut, "{}", file.len());
    }
}

/// The blocks of a packed stream, and the index at its end.
fn parts(file: &[u8]) -> (Vec<Vec<u8>>, Vec<u8>) {
    let index = open(file).unwrap();
    let mut rest = file;
    let blocks = index.index().entries().iter().map(|entry| {
        let (block, behind) = rest.split_at(usize::try_from(entry.packed_bytes).unwrap());
        rest = behind;
        block.to_vec()
    });
    (blocks.collect(), rest.to_vec())
}

/// Each block is valid by itself, so replaced blocks were not detected.
#[test]
fn a_missing_duplicated_or_misplaced_block_is_damage() {
    for (packing, length) in [(Packing::Gzip, 3_300_000), (Packing::Zstd, 9_700_000)] {
        let bytes = stream(length);
        let file = packed(&bytes, packing);
        let (blocks, index) = parts(&file);
        let count = blocks.len();
        let all: Vec<usize> = (0..count).collect();
        let mut orders = vec![Vec::new(), [&[0][..], &all].concat(), [&[0, 1][..], &all].concat()];
        for number in 0..count {
            let (before, behind) = (&all[..number], &all[number..]);
            orders.push([before, &behind[1..]].concat());
            orders.push([before, &[number], behind].concat());
            let mut swapped = all.clone();
            swapped.swap(number, (number + 1) % count);
            orders.push(swapped);
        }
        for order in orders {
            let mut changed: Vec<u8> = order.iter().flat_map(|number| blocks[*number].clone()).collect();
            changed.extend(&index);
            for joined in [
                changed.clone(),
                [&file[..], &changed].concat(),
                [&changed[..], &file].concat(),
            ] {
                let error = unpacked(&joined).expect_err(&format!("{packing:?} {order:?}"));
                let kinds = [std::io::ErrorKind::InvalidData, std::io::ErrorKind::UnexpectedEof];
                assert!(kinds.contains(&error.kind()), "{error}");
            }
        }
        assert_eq!(unpacked(&[blocks.concat(), index].concat()).unwrap().1, bytes);
    }
}

/// An index member may be missing or duplicated.
#[test]
fn an_incomplete_index_is_damage() {
    // Enough blocks for an index of two members; they are not unpacked here.
    let block = gzip::pack(&mut libdeflater::Compressor::default(), &vec![0; 1 << 20]).unwrap();
    let block = |number: u32| {
        let mut block = block.clone();
        let tail_at = block.len() - 8;
        block[tail_at..tail_at + 4].copy_from_slice(&number.to_le_bytes());
        block
    };
    let blocks: Vec<Vec<u8>> = (0..5500).map(block).collect();
    let mut index = super::PackedIndex::default();
    for (number, block) in (0..).zip(&blocks) {
        index.push(u32::try_from(block.len()).unwrap(), 1 << 20, number);
    }
    let index = index.encode(Packing::Gzip).unwrap();
    let mut members = Vec::new();
    let mut rest = &index[..];
    while let Some((length, _)) = gzip::sizes(rest) {
        members.push(&rest[..length]);
        rest = &rest[length..];
    }
    assert_eq!(members.len(), 3);
    for (order, is_whole) in [
        (&[0, 1, 2][..], true),
        (&[0, 1], false),
        (&[0, 2], false),
        (&[1, 2], false),
        (&[1, 0, 2], false),
        (&[0, 0, 1, 2], false),
        (&[2], false),
        (&[2, 0, 1, 2], false),
    ] {
        let mut tally = super::GzipValidator::default();
        for block in &blocks {
            tally.member(block, 1 << 20).unwrap();
        }
        let mut held = order.iter().map(|number| tally.member(members[*number], 0));
        let held = held.try_for_each(|held| held).and_then(|()| tally.check_end());
        assert_eq!(held.is_ok(), is_whole, "{order:?}");
    }
}

/// Other programs use other frame sizes and other kinds of seek tables.
#[test]
fn frames_and_seek_tables_of_other_programs_are_not_damage() {
    let bytes = stream(9_700_000);
    let packed_here = packed(&bytes, Packing::Zstd);
    let frame = |bytes: &[u8]| zstd::bulk::compress(bytes, 1).unwrap();
    let table = |entries: &[(usize, usize)], flags: u8| {
        let mut table: Vec<u8> = Vec::new();
        for (packed, unpacked) in entries {
            table.extend(u32::try_from(*packed).unwrap().to_le_bytes());
            table.extend(u32::try_from(*unpacked).unwrap().to_le_bytes());
            table.extend(if flags == 0 { &[][..] } else { &[9; 4] });
        }
        table.extend(u32::try_from(entries.len()).unwrap().to_le_bytes());
        table.push(flags);
        table.extend(0x8f92_eab1_u32.to_le_bytes());
        let length = u32::try_from(table.len()).unwrap().to_le_bytes();
        [&super::zstd_frame::SEEK_TABLE.to_le_bytes()[..], &length, &table].concat()
    };
    let skipped = |length: u32| {
        let content = vec![7; usize::try_from(length).unwrap()];
        [
            &super::zstd_frame::SEEK_TABLE.to_le_bytes()[..],
            &length.to_le_bytes(),
            &content,
        ]
        .concat()
    };
    let (one, two) = (frame(&bytes[..1 << 20]), frame(&bytes[1 << 20..3 << 20]));
    let sizes = [(one.len(), 1 << 20), (two.len(), 2 << 20)];
    let with_skipped = [(one.len(), 1 << 20), (12, 0), (two.len(), 2 << 20)];
    for foreign in [
        [&one[..], &two].concat(),
        [&one[..], &two, &table(&sizes, 0x80)].concat(),
        [&one[..], &two, &table(&sizes, 0)].concat(),
        [&one[..], &skipped(4), &two, &table(&with_skipped, 0x80)].concat(),
        [
            &skipped(0)[..],
            &one,
            &skipped(9),
            &two,
            &skipped(21),
            &skipped(100_001),
        ]
        .concat(),
    ] {
        let expected = &bytes[..3 << 20];
        assert_eq!(unpacked(&foreign).unwrap().1, expected);
        let both = unpacked(&[&foreign[..], &packed_here].concat()).unwrap().1;
        assert!(both == [expected, &bytes].concat());
        let both = unpacked(&[&packed_here[..], &foreign].concat()).unwrap().1;
        assert!(both == [&bytes[..], expected].concat());
    }
    // It has the length of a block of Holdfast by chance.
    let foreign = [frame(&bytes[7..7 + (4 << 20)]), packed_here.clone()].concat();
    assert!(unpacked(&foreign).unwrap().1 == [&bytes[7..7 + (4 << 20)], &bytes].concat());
    // An empty stream of Holdfast has no blocks.
    let empty = packed(&[], Packing::Zstd);
    assert!(unpacked(&[&packed_here[..], &empty, &packed_here].concat()).unwrap().1 == [&bytes[..], &bytes].concat());
}

#[test]
fn every_offset_is_read_by_the_index() {
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
fn a_missing_or_wrong_index_is_refused() {
    let bytes = stream(1_500_000);
    for packing in [Packing::Gzip, Packing::Zstd] {
        let file = packed(&bytes, packing);
        let end = usize::try_from(open(&file).unwrap().index().packed_bytes()).unwrap();
        assert!(matches!(open(&file[..end]), Err(Error::NoIndex)));
        assert!(matches!(open(&file[..file.len() - 1]), Err(Error::NoIndex)));
        for at in end..file.len() {
            let mut changed = file.clone();
            changed[at] ^= 1;
            // A wrong index is refused when it is opened, or detected when blocks are read.
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

/// Random access detects every flipped bit of a size field or the index, as gzip and sequential readers do.
#[test]
fn every_flipped_bit_of_a_size_field_or_index_is_detected() {
    let file = packed(&stream(1_500_000), Packing::Gzip);
    let index = open(&file).unwrap();
    let second_at = usize::try_from(index.index().entries()[1].packed_offset).unwrap();
    let index_at = usize::try_from(index.index().packed_bytes()).unwrap();
    let fields = [10..26, second_at + 10..second_at + 26, index_at..file.len()];
    for at in fields.into_iter().flatten() {
        for bit in 0..8 {
            let mut changed = file.clone();
            changed[at] ^= 1 << bit;
            match open(&changed) {
                Ok(file) => {
                    let error = file
                        .check(THREADS.count, &mut |_| Ok(()))
                        .expect_err("a changed file is an error");
                    assert!(matches!(error, Error::Corrupt { .. }), "{error}");
                }
                Err(Error::Corrupt { what: "index", .. }) => {}
                // Without its last member the file has no index: a sequential read finds the damage.
                Err(error) => assert!(matches!(error, Error::NoIndex), "{at}: {error}"),
            }
            unpacked(&changed).expect_err("a changed file is an error");
        }
    }
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

/// Sends written bytes over a channel.
struct ChannelWriter(std::sync::mpsc::Sender<Vec<u8>>);

impl Write for ChannelWriter {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.send(bytes.to_vec()).ok();
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// When the source failed, the output got an index, as if it were complete.
#[test]
fn an_aborted_stream_has_no_index() {
    let bytes = stream(2_500_000);
    for packing in [Packing::Gzip, Packing::Zstd] {
        let options = PackOptions {
            packing,
            level: None,
            threads: THREADS,
        };
        let fails = std::io::Cursor::new(bytes.clone()).chain(FailingReader);
        let (sender, receiver) = std::sync::mpsc::channel();
        let error = pack(fails, Box::new(ChannelWriter(sender)), options, &mut |_| Ok(())).unwrap_err();
        assert!(matches!(error, Error::Read { .. }), "{error}");
        let written: Vec<u8> = receiver.into_iter().flatten().collect();
        assert!(matches!(open(&written), Err(Error::NoIndex)), "{packing:?}");
    }
}

/// A reader that always fails.
struct FailingReader;

impl Read for FailingReader {
    fn read(&mut self, _: &mut [u8]) -> std::io::Result<usize> {
        Err(std::io::ErrorKind::Other.into())
    }
}

#[test]
fn a_closed_output_ends_the_packing() {
    struct FullWriter;
    impl Write for FullWriter {
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
    let mut packer = Packer::new(Box::new(FullWriter), options(None)).unwrap();
    let error = std::io::copy(&mut std::io::repeat(7).take(1 << 30), &mut packer).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::StorageFull);
    assert!(matches!(
        Packer::new(Box::new(FullWriter), options(Some(30))),
        Err(Error::InvalidOption { .. })
    ));
}

/// Empty members must not recurse: any number of them takes as much stack as one.
#[test]
fn any_number_of_empty_members_is_skipped() {
    let mut empty = Vec::new();
    flate2::write::GzEncoder::new(&mut empty, flate2::Compression::default())
        .finish()
        .unwrap();
    let mut file = empty.repeat(200_000);
    file.extend(packed(b"the data after the empty members", Packing::Gzip));
    assert_eq!(unpacked(&file).unwrap().1, b"the data after the empty members");
}
