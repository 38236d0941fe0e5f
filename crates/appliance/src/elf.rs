//! Programs in ELF: what the appliance needs of them.

#![deny(clippy::indexing_slicing)]

/// A part of a program header table entry.
const HEADER_BYTES: usize = 56;
const TYPE_LOAD: u32 = 1;
const TYPE_INTERPRETER: u32 = 3;

/// The parts of a program that its start needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Program {
    /// The path of the loader; none if the program is static.
    pub(super) interpreter: Option<String>,
    /// The length of the file without symbols and section headers.
    pub(super) loaded_bytes: usize,
}

fn number<const N: usize>(bytes: &[u8], at: usize) -> Option<u64> {
    let field = bytes.get(at..at.checked_add(N)?)?;
    Some(
        field
            .iter()
            .rev()
            .fold(0, |number, byte| number << 8 | u64::from(*byte)),
    )
}

/// Reads the header of a 64-bit little-endian program; none if it is something else.
pub(super) fn read(bytes: &[u8]) -> Option<Program> {
    if !bytes.starts_with(b"\x7fELF\x02\x01") {
        return None;
    }
    let place = |value: Option<u64>| value.and_then(|value| usize::try_from(value).ok());
    let table = place(number::<8>(bytes, 32))?;
    let count = place(number::<2>(bytes, 56))?;
    if place(number::<2>(bytes, 54))? != HEADER_BYTES {
        return None;
    }
    let mut program = Program {
        interpreter: None,
        loaded_bytes: table.checked_add(count.checked_mul(HEADER_BYTES)?)?,
    };
    for at in (0..count).map(|entry| table + entry * HEADER_BYTES) {
        let kind = number::<4>(bytes, at)?;
        let (start, length) = (place(number::<8>(bytes, at + 8))?, place(number::<8>(bytes, at + 32))?);
        let end = start.checked_add(length)?;
        if kind == u64::from(TYPE_LOAD) {
            program.loaded_bytes = program.loaded_bytes.max(end);
        }
        if kind == u64::from(TYPE_INTERPRETER) {
            let path = bytes.get(start..end)?.split(|byte| *byte == 0).next()?;
            program.interpreter = Some(String::from_utf8(path.to_vec()).ok()?);
        }
    }
    (program.loaded_bytes <= bytes.len()).then_some(program)
}

/// The program without symbols: what follows the loaded parts is cut off, and the header does not refer to it.
pub(super) fn without_symbols(mut bytes: Vec<u8>, program: &Program) -> Vec<u8> {
    bytes.truncate(program.loaded_bytes);
    // The place of the section headers, and their number and names.
    for field in [40..48, 60..64] {
        bytes.get_mut(field).unwrap_or_default().fill(0);
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::{read, without_symbols};

    #[test]
    fn this_program_is_read_and_shortened() {
        let bytes = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        let program = read(&bytes).unwrap();
        let length = bytes.len();
        let short = without_symbols(bytes, &program);
        assert!(short.len() <= length);
        assert_eq!(read(&short), Some(program));
        for length in 0..short.len().min(2000) {
            read(&short[..length]);
        }
        assert_eq!(read(b"#!/bin/sh"), None);
    }
}
