//! Fuzz targets for streams of differences.

use holdfast_block::hostile::Outcome;

use super::send_stream::record::ByteOrder;
use super::send_stream::specimen::{Field, QUERY, SendStreamWriter, SenderVersion};
use super::send_stream::{by_send_stream, read_unchecked};
use super::thin_delta::{ThinDeltaQuery, by_thin_delta};

/// A stream of differences. At first, checksums are ignored, since a fuzzer rarely produces correct ones.
pub(crate) fn send_stream(bytes: &[u8]) -> Outcome {
    if let Ok(found) = read_unchecked(&mut &bytes[..], &QUERY) {
        assert!(found.stream_bytes == bytes.len() as u64, "it was read to its end");
        let mut end = None;
        for range in found.ranges.as_slice() {
            assert!(range.start < range.end && range.end <= found.ranges.size_bytes());
            assert!(end < Some(range.start), "they are in order and do not touch");
            end = Some(range.end);
        }
        let all = found.ranges.size_bytes();
        assert!(found.whole.is_none() || found.ranges.bytes() == all, "all is all");
    }
    match by_send_stream(&mut &bytes[..], &QUERY) {
        Ok(_) => Outcome::Decoded,
        Err(_) => Outcome::Refused,
    }
}

/// The differences of two thin volumes, as `thin_delta` prints them.
pub(crate) fn thin_delta(bytes: &[u8]) -> Outcome {
    let query = ThinDeltaQuery {
        ids: (5, 7),
        block_bytes: 65_536,
        size_bytes: 1 << 40,
    };
    match by_thin_delta(&String::from_utf8_lossy(bytes), &query) {
        Ok(ranges) => {
            assert!(
                ranges
                    .as_slice()
                    .iter()
                    .all(|range| range.start < range.end && range.end <= 1 << 40)
            );
            Outcome::Decoded
        }
        Err(_) => Outcome::Refused,
    }
}

/// Streams of old and new senders, in both byte orders; and differences of thin volumes.
pub(crate) fn seeds() -> Vec<(&'static str, &'static str, Vec<u8>)> {
    let variants = [
        ("old", ByteOrder::Little, SenderVersion::Old),
        ("old_big_endian", ByteOrder::Big, SenderVersion::Old),
        ("new", ByteOrder::Little, SenderVersion::New),
        ("new_big_endian", ByteOrder::Big, SenderVersion::New),
    ];
    let seed = |(name, order, age)| {
        let mut writer = SendStreamWriter::new(order, age, 0);
        writer
            .object(8, 8192, 100_000, 50)
            .free(8, 106_496, u64::MAX)
            .write(8, 8192, 64)
            .free(8, 32_768, 8192);
        let embedded = [
            Field::Long(8, 8),
            Field::Long(16, 65_536),
            Field::Long(24, 8192),
            Field::Word(52, 13),
        ];
        writer.record(8, &embedded, &[1; 16]);
        let compressed = [
            Field::Long(8, 8),
            Field::Long(24, 81_920),
            Field::Long(32, 8192),
            Field::Byte(50, 15),
            Field::Long(96, 32),
        ];
        writer.record(3, &compressed, &[2; 32]);
        writer.record(2, &[Field::Long(8, 9), Field::Long(16, 23)], &[]);
        ("send_stream", name, writer.end())
    };
    let differences = "<superblock uuid=\"\" time=\"1\" transaction=\"2\" data_block_size=\"128\" nr_data_blocks=\"0\">\n\
        <diff left=\"5\" right=\"7\">\n<same begin=\"0\" length=\"4\"/>\n<different begin=\"4\" length=\"1\"/>\n\
        <right_only begin=\"5\" length=\"1\"/>\n<left_only begin=\"8\" length=\"2\"/>\n</diff>\n</superblock>\n";
    let thin = ("thin_delta", "differences", differences.as_bytes().to_vec());
    variants.into_iter().map(seed).chain([thin]).collect()
}
