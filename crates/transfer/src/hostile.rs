//! The parsers of this crate, for fuzzing; see [`holdfast_block::hostile`].

use holdfast_block::hostile::{Outcome, Parser};

use crate::journal::JournalState;
use crate::wire::{
    CompressedRange, FieldReader, FieldWriter, FrameDecoder, Message, RangeCompressor, RangeContent, RangeDecompressor,
    RangeFrame,
};

/// Where the payload of a frame begins, and where the body of a journal entry begins, in bytes.
const FRAME_HEADER_BYTES: usize = 16;
const ENTRY_HEADER_BYTES: usize = 4;

/// The parsers of this crate.
pub const PARSERS: &[Parser] = &[
    Parser {
        name: "transfer_frames",
        feed: transfer_frames,
    },
    Parser {
        name: "transfer_compressed",
        feed: transfer_compressed,
    },
    Parser {
        name: "transfer_journal",
        feed: transfer_journal,
    },
];

/// Valid bytes for each parser: its name, the name of the seed, bytes.
pub fn seeds() -> Vec<(&'static str, &'static str, Vec<u8>)> {
    let session = include_bytes!("../tests/fixtures/session-v1.bin");
    let compressed = include_bytes!("../tests/fixtures/compressed-v1.bin");
    let journal = include_bytes!("../tests/fixtures/journal-v1.bin");
    vec![
        ("transfer_frames", "session", session.to_vec()),
        ("transfer_frames", "compressed", compressed.to_vec()),
        ("transfer_compressed", "sectors", compressed_seed(&[7; 512].repeat(16))),
        ("transfer_compressed", "zeroes", compressed_seed(&[0; 300_000])),
        ("transfer_journal", "journal", journal.to_vec()),
    ]
}

/// Corrects the checksums of the records in `bytes`, each of which begins with the length of what follows its header.
fn with_checksums(bytes: &[u8], header_bytes: usize) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    let mut start = 0;
    while let Some(length) = bytes.get(start..).and_then(<[u8]>::first_chunk) {
        let covered = (u32::from_le_bytes(*length) as usize).saturating_add(header_bytes);
        let Some(record) = bytes
            .get_mut(start..)
            .filter(|rest| rest.len() >= covered.saturating_add(4))
        else {
            break;
        };
        let (covered, rest) = record.split_at_mut(covered);
        if let Some(place) = rest.first_chunk_mut() {
            *place = crc32c::crc32c(covered).to_le_bytes();
        }
        start += covered.len() + 4;
    }
    bytes
}

/// Decodes a byte stream of a peer. Decoded frames are the same after encoding.
pub fn transfer_frames(bytes: &[u8]) -> Outcome {
    let mut decoder = FrameDecoder::new();
    decoder.push(&with_checksums(bytes, FRAME_HEADER_BYTES));
    let mut outcome = Outcome::Refused;
    while let Ok(Some(frame)) = decoder.next_frame() {
        outcome = Outcome::Decoded;
        if matches!(frame.message, Message::Skipped { .. }) {
            continue;
        }
        let mut encoded = Vec::new();
        frame.encode(&mut encoded);
        assert_eq!(encoded.len() as u64, frame.encoded_bytes());
        let mut again = FrameDecoder::new();
        again.push(&encoded);
        assert_eq!(again.next_frame(), Ok(Some(frame)));
    }
    outcome
}

/// The payload of COMPRESSED for this data at the start of the disk.
pub fn compressed_seed(data: &[u8]) -> Vec<u8> {
    let frame = RangeFrame {
        pass: 0,
        range: 0..data.len() as u64,
        content: RangeContent::Data(data.to_vec()),
    };
    let compressed = RangeCompressor::default().compress(&frame);
    let mut payload = Vec::new();
    compressed
        .expect("seeds become smaller")
        .encode(&mut FieldWriter(&mut payload));
    payload
}

/// Decodes the payload of a COMPRESSED message, and its data. Compressing the data again does not change it.
pub fn transfer_compressed(bytes: &[u8]) -> Outcome {
    let Ok(frame) = CompressedRange::decode(&mut FieldReader::new(bytes, "COMPRESSED")) else {
        return Outcome::Refused;
    };
    let mut decompressor = RangeDecompressor::default();
    let Ok(data) = decompressor.decompress(&frame) else {
        return Outcome::Refused;
    };
    let plain = RangeFrame {
        pass: frame.pass,
        range: frame.range.clone(),
        content: RangeContent::Data(data.clone()),
    };
    if let Some(again) = RangeCompressor::default().compress(&plain) {
        assert_eq!((again.pass, &again.range), (frame.pass, &frame.range));
        assert_eq!(decompressor.decompress(&again), Ok(data));
    }
    Outcome::Decoded
}

/// Decodes the journal of a receiver.
pub fn transfer_journal(bytes: &[u8]) -> Outcome {
    let bytes = with_checksums(bytes, ENTRY_HEADER_BYTES);
    match JournalState::decode(&bytes) {
        Ok(Some(state)) => {
            let valid_bytes = usize::try_from(state.valid_bytes).expect("a part of the input");
            let valid = bytes
                .get(..valid_bytes)
                .expect("the valid bytes are a part of the input");
            assert_eq!(JournalState::decode(valid), Ok(Some(state)));
            Outcome::Decoded
        }
        Ok(None) | Err(_) => Outcome::Refused,
    }
}
