//! Fuzz targets for malformed memory streams and states.

use holdfast_block::hostile::Outcome;
use holdfast_block::{BlockDeviceMut, Error, MemoryDevice, to_usize};

use super::{MemoryState, assemble, disassemble};

const PAGE_BYTES: u64 = 4096;
/// The limit on the memory in fuzzing.
const SIZE_BYTES_MAX: u64 = 1 << 20;

fn make_store(size_bytes: u64) -> holdfast_block::Result<Box<dyn BlockDeviceMut>> {
    if size_bytes > SIZE_BYTES_MAX {
        return Err(Error::Unsupported {
            what: "a memory",
            detail: format!("{size_bytes} bytes"),
        });
    }
    Ok(Box::new(MemoryDevice::new(size_bytes)))
}

/// Parses the state of a memory.
pub(crate) fn state(bytes: &[u8]) -> Outcome {
    match MemoryState::decode(bytes) {
        Err(_) => Outcome::Refused,
        Ok(state) => {
            assert_eq!(state.encode(), bytes, "one state has one form");
            Outcome::Decoded
        }
    }
}

/// Parses a stream of QEMU, and checks that a stream that is assembled from its parts has the same parts.
pub(crate) fn stream(bytes: &[u8]) -> Outcome {
    let Ok((state, memory)) = disassemble(&mut &bytes[..], PAGE_BYTES, &mut make_store) else {
        return Outcome::Refused;
    };
    let mut again = Vec::new();
    assemble(&state, &*memory, &mut again).expect("memory takes it");
    let (state_again, memory_again) =
        disassemble(&mut &again[..], PAGE_BYTES, &mut make_store).expect("what we make can be read");
    assert_eq!(state_again, state);
    let pages = |memory: &dyn BlockDeviceMut| {
        let mut pages = vec![0; to_usize(memory.size_bytes())];
        memory.read_at(&mut pages, 0).expect("it is in memory");
        pages
    };
    assert!(pages(&*memory) == pages(&*memory_again), "the pages are the same");
    Outcome::Decoded
}

/// A small stream, with and without footers, and its state.
pub(crate) fn seeds() -> Vec<(&'static str, &'static str, Vec<u8>)> {
    let mut seeds = Vec::new();
    for (name, has_footers) in [("footers", true), ("old", false)] {
        let stream = example(has_footers);
        let taken = disassemble(&mut &stream[..], PAGE_BYTES, &mut make_store);
        let (state, _) = taken.expect("the example is right");
        seeds.push(("memory_state", name, state.encode()));
        seeds.push(("memory_stream", name, stream));
    }
    seeds
}

fn example(has_footers: bool) -> Vec<u8> {
    let text = |text: &str| [&[u8::try_from(text.len()).expect("short")], text.as_bytes()].concat();
    let footer = if has_footers {
        vec![0x7e, 0, 0, 0, 2]
    } else {
        Vec::new()
    };
    let end = [&0x10_u64.to_be_bytes()[..], &footer].concat();
    let page = |word: u64, name: &str, byte: u8| {
        let mut record = word.to_be_bytes().to_vec();
        if !name.is_empty() {
            record.extend(text(name));
        }
        record.extend([byte].repeat(if word & 0x08 != 0 { 4096 } else { 1 }));
        record
    };
    let mut stream = [&b"QEVM\0\0\0\x03\x07\0\0\0\x02pc"[..], &[1, 0, 0, 0, 2]].concat();
    stream.extend(text("ram"));
    stream.extend([0, 0, 0, 0, 0, 0, 0, 4]);
    stream.extend(((4 * PAGE_BYTES) | 0x04).to_be_bytes());
    for (name, pages) in [("pc.ram", 3), ("rom", 1)] {
        stream.extend(text(name));
        stream.extend((pages * PAGE_BYTES).to_be_bytes());
    }
    stream.extend(&end);
    stream.extend([2, 0, 0, 0, 2]);
    stream.extend(page(0x08, "pc.ram", 7));
    stream.extend(page(PAGE_BYTES | 0x28, "", 8));
    stream.extend(page(PAGE_BYTES | 0x22, "", 0));
    stream.extend(&end);
    stream.extend([3, 0, 0, 0, 2]);
    stream.extend(page((2 * PAGE_BYTES) | 0x28, "", 9));
    stream.extend(page(0x08, "rom", 10));
    stream.extend(&end);
    stream.extend([4, 0, 0, 0, 9, 3, b'c', b'p', b'u', 0]);
    stream
}

#[cfg(test)]
mod tests {
    use super::{PAGE_BYTES, example, make_store};
    use crate::qemu::memory::disassemble;

    /// If two blocks had the same name, pages of the second would be assigned to the first.
    #[test]
    fn blocks_of_one_name_are_refused() {
        let stream = example(true);
        let at = stream
            .windows(4)
            .position(|bytes| bytes == b"\x03rom")
            .expect("it has such a block");
        let mut twins = stream[..at].to_vec();
        twins.extend(b"\x06pc.ram");
        twins.extend(&stream[at + 4..]);
        let error = disassemble(&mut &twins[..], PAGE_BYTES, &mut make_store)
            .err()
            .expect("it is refused");
        assert!(error.to_string().contains("name or size of a block"), "{error}");
    }
}
