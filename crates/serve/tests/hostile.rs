//! Feeds the input of a hostile server to the client's parsers, without a fuzzer.

use holdfast_block::conformance::test_seed;
use holdfast_block::hostile::{MemoryBound, ParserTrial};
use holdfast_serve::nbd::client::hostile::{PARSERS, seeds};
use peak_alloc::PeakAlloc;

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

/// A descriptor takes 8 bytes on the wire and 16 bytes of memory, and exists twice while it is returned; names are
/// copied.
const BOUND: MemoryBound = MemoryBound {
    per_byte: 16,
    constant_bytes: 64 << 10,
};

#[test]
fn hostile_bytes_are_an_error_and_take_no_more_memory_than_they_justify() {
    let seeds = seeds().into_iter().map(|(parser, _, bytes)| (parser, bytes)).collect();
    ParserTrial {
        parsers: PARSERS,
        seeds,
        expanding: vec![("nbd_handshake", long_list())],
        bound: |_| BOUND,
        case_count: 200_000,
        seed: test_seed(),
        allocator: &ALLOCATOR,
    }
    .run();
}

/// The maximum number of exports in a list, all without a name.
fn long_list() -> Vec<u8> {
    let reply = |kind: u32, data: &[u8]| {
        let length = u32::try_from(data.len()).expect("a few bytes");
        let magic = 0x0003_e889_0455_65a9u64.to_be_bytes();
        [
            &magic[..],
            &3u32.to_be_bytes(),
            &kind.to_be_bytes(),
            &length.to_be_bytes(),
            data,
        ]
        .concat()
    };
    let mut bytes = [&[1][..], b"NBDMAGICIHAVEOPT", &[0, 3]].concat();
    for _ in 0..19_999 {
        bytes.extend(reply(2, &[0; 4]));
    }
    bytes.extend(reply(1, &[]));
    bytes
}
