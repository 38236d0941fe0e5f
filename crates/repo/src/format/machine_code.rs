//! A reversible filter for x86 machine code that improves compression.
//!
//! Code contains relative addresses, so two calls of one function differ. The filter replaces relative addresses
//! by offsets in the frame: they become equal, and zstd finds them.
//!
//! From the first byte on, while at least seven bytes follow:
//!
//! - after `E8` (call) and `E9` (jump), and after a prefix `48` to `4F` with `8B`, `89` or `8D` (moves of eight bytes)
//!   and a byte of which the bits `C7` are `05` (address relative to the instruction), four bytes are a distance,
//!   little-endian. If it is in -2^24 to 2^24 - 1, the offset after these four bytes is added, with wrap-around within
//!   these limits; otherwise it is unchanged. In both cases the filter continues after the four bytes;
//! - at all other bytes it continues with the next byte.
//!
//! Distances stay within the limits in which they are replaced, and no byte that a decision depends on is changed
//! later. So the inverse makes the same decisions, and is exact for all bytes, whether they are code or not.

/// Length of the longest instruction that the filter recognizes.
const INSTRUCTION_LENGTH_MAX: usize = 7;
const DISTANCE_LENGTH: usize = 4;
/// Distances from minus this value up to this value, exclusive, are replaced.
const DISTANCE_END: u32 = 1 << 24;

/// Number of bytes after a position that decide how it is processed: the look-ahead of the inverse.
pub(crate) const LOOK_AHEAD_LENGTH: usize = INSTRUCTION_LENGTH_MAX;

/// Larger frames are sampled to detect code; frames up to this length are examined completely.
const SAMPLED_BYTES_MIN: usize = 256 << 10;
const SAMPLE_BYTES: usize = 4096;
/// Minimum number of calls with a plausible distance per 1024 bytes for data to count as code: code has 7 to 17, most
/// other data below 2.
const CALLS_PER_KIBIBYTE: usize = 6;

/// Replaces distances by positions.
pub(crate) fn filter(bytes: &mut [u8]) {
    replace_distances(bytes, u32::wrapping_add);
}

/// Reverts [`filter`]; given only the start of filtered data, all but the last [`LOOK_AHEAD_LENGTH`] bytes
/// are correct.
pub(crate) fn unfilter(bytes: &mut [u8]) {
    replace_distances(bytes, u32::wrapping_sub);
}

fn replace_distances(bytes: &mut [u8], replace: impl Fn(u32, u32) -> u32) {
    let mut at = 0;
    while let Some(window) = bytes.get_mut(at..at + INSTRUCTION_LENGTH_MAX) {
        let start = match window[0] {
            0xE8 | 0xE9 => 1,
            0x48..=0x4F if matches!(window[1], 0x8B | 0x89 | 0x8D) && window[2] & 0xC7 == 0x05 => 3,
            _ => {
                at += 1;
                continue;
            }
        };
        let (_, distance) = window.split_at_mut(start);
        let distance = distance
            .first_chunk_mut::<DISTANCE_LENGTH>()
            .expect("the window is as long as the longest instruction");
        at += start + DISTANCE_LENGTH;
        let value = u32::from_le_bytes(*distance);
        if is_near(value) {
            // Positions are counted modulo the width of the limits, so that frames of any length work.
            let place = u32::try_from(at & (2 * DISTANCE_END as usize - 1)).expect("below 2^25");
            *distance = wrap(replace(value, place)).to_le_bytes();
        }
    }
}

/// Whether a distance is within the limits.
fn is_near(distance: u32) -> bool {
    distance.wrapping_add(DISTANCE_END) < 2 * DISTANCE_END
}

/// Wraps a distance into the limits.
fn wrap(distance: u32) -> u32 {
    (distance.wrapping_add(DISTANCE_END) & (2 * DISTANCE_END - 1)).wrapping_sub(DISTANCE_END)
}

/// Whether bytes look like machine code; of a large frame a sixteenth is examined.
pub(crate) fn is_machine_code(bytes: &[u8]) -> bool {
    let stride = if bytes.len() < SAMPLED_BYTES_MIN {
        SAMPLE_BYTES
    } else {
        16 * SAMPLE_BYTES
    };
    let samples = || bytes.chunks(stride).map(|part| &part[..part.len().min(SAMPLE_BYTES)]);
    let calls: usize = samples().map(count_calls).sum();
    let looked_at: usize = samples().map(<[u8]>::len).sum();
    calls * 1024 > looked_at * CALLS_PER_KIBIBYTE
}

fn count_calls(bytes: &[u8]) -> usize {
    let calls = bytes.windows(1 + DISTANCE_LENGTH).filter(|window| {
        let distance = [window[1], window[2], window[3], window[4]];
        window[0] == 0xE8 && is_near(u32::from_le_bytes(distance))
    });
    calls.count()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{Strategy, any, prop_assert_eq, prop_oneof, proptest};

    use super::{LOOK_AHEAD_LENGTH, filter, is_machine_code, unfilter};

    /// Bytes with many overlapping instruction prefixes, and near and far distances.
    fn code() -> impl Strategy<Value = Vec<u8>> {
        let byte = prop_oneof![
            proptest::sample::select(vec![
                0xE8, 0xE9, 0x48, 0x4C, 0x4F, 0x8B, 0x89, 0x8D, 0x05, 0x3D, 0x00, 0xFF, 0x01, 0xFE
            ]),
            any::<u8>(),
        ];
        proptest::collection::vec(byte, 0..400)
    }

    proptest! {
        #[test]
        fn filtered_code_is_restored(bytes in code()) {
            let mut filtered = bytes.clone();
            filter(&mut filtered);
            prop_assert_eq!(filtered.len(), bytes.len());
            unfilter(&mut filtered);
            prop_assert_eq!(filtered, bytes);
        }

        #[test]
        fn all_but_the_end_of_a_start_comes_back(bytes in code(), cut in any::<proptest::sample::Index>()) {
            let mut filtered = bytes.clone();
            filter(&mut filtered);
            let length = cut.index(bytes.len() + 1);
            let start = &mut filtered[..length];
            unfilter(start);
            let known = length.saturating_sub(LOOK_AHEAD_LENGTH);
            prop_assert_eq!(&start[..known], &bytes[..known]);
        }
    }

    #[test]
    fn calls_of_one_function_become_equal_and_far_distances_stay() {
        let mut bytes = vec![0x90; 64];
        for (at, distance) in [(0usize, 1000i32), (20, 980)] {
            bytes[at] = 0xE8;
            bytes[at + 1..at + 5].copy_from_slice(&distance.to_le_bytes());
        }
        // lea r9, [rip + 100], and one with a distance beyond the limit.
        bytes[40..47].copy_from_slice(&[0x4C, 0x8D, 0x0D, 100, 0, 0, 0]);
        bytes[50..57].copy_from_slice(&[0x48, 0x8B, 0x05, 0, 0, 0, 1]);
        let mut filtered = bytes.clone();
        filter(&mut filtered);
        assert_eq!(filtered[..5], [0xE8, 0xED, 0x03, 0, 0]);
        assert_eq!(filtered[..5], filtered[20..25]);
        assert_eq!(filtered[40..47], [0x4C, 0x8D, 0x0D, 147, 0, 0, 0]);
        assert_eq!(filtered[50..], bytes[50..]);
    }

    /// At the limits distances wrap around, and positions beyond them start again at zero.
    #[test]
    fn distances_at_the_limits_come_back() {
        const LIMIT: i32 = 1 << 24;
        let mut bytes = vec![0; (2 << 24) + 64];
        for (at, distance) in [
            (0, LIMIT - 1),
            (5, -LIMIT),
            (10, LIMIT),
            (15, -LIMIT - 1),
            ((2 << 24) - 2, LIMIT - 7),
        ] {
            bytes[at] = 0xE8;
            bytes[at + 1..at + 5].copy_from_slice(&distance.to_le_bytes());
        }
        let mut filtered = bytes.clone();
        filter(&mut filtered);
        assert_eq!(filtered[1..5], (4 - LIMIT).to_le_bytes());
        assert_eq!(filtered[10..20], bytes[10..20]);
        unfilter(&mut filtered);
        assert!(filtered == bytes);
    }

    #[test]
    fn code_is_known_by_its_calls() {
        for length in [4096, 1 << 20] {
            let mut code = vec![0x90; length];
            code.chunks_exact_mut(100)
                .for_each(|part| part[..5].copy_from_slice(&[0xE8, 5, 5, 0, 0]));
            assert!(is_machine_code(&code));
            assert!(!is_machine_code(&b"E8 is the opcode of a call. ".repeat(length / 28)));
            assert!(!is_machine_code(&vec![0xE8; length]));
        }
        assert!(!is_machine_code(&[]));
    }
}
