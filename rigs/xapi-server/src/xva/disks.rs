//! Disks in the stream.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::FileExt;

use holdfast_block::{is_zero, to_usize};

use super::{BLOCK_BYTES, checksum, tar};
use crate::failure::Failure;
use crate::habits::Habits;
use crate::handlers::Target;

/// Writes a disk as the members `PREFIX/00000000` and so on.
///
/// If `spoils_a_checksum` is set, the first checksum is wrong, and the flag is cleared.
pub(crate) fn write(
    out: &mut dyn Write,
    prefix: &str,
    file: &File,
    size_bytes: u64,
    habits: &Habits,
    spoils_a_checksum: &mut bool,
) -> io::Result<()> {
    let mut block = vec![0; to_usize(BLOCK_BYTES)];
    let mut number = 0_u64;
    let mut offset = 0;
    let mut since_empty = 0;
    while offset < size_bytes {
        let length = to_usize(BLOCK_BYTES.min(size_bytes - offset));
        let block = &mut block[..length];
        let is_first_or_last = offset == 0 || offset + block.len() as u64 == size_bytes;
        if habits.keep_alive_every > 0 && since_empty >= habits.keep_alive_every && !is_first_or_last {
            // An empty block has a number but no data.
            write_block(out, prefix, number, &[], habits, spoils_a_checksum)?;
            since_empty = 0;
        } else {
            file.read_exact_at(block, offset)?;
            if is_first_or_last || !habits.skips_zero_blocks || !is_zero(block) {
                write_block(out, prefix, number, block, habits, spoils_a_checksum)?;
            }
            offset += block.len() as u64;
            since_empty += 1;
        }
        number += 1;
    }
    Ok(())
}

fn write_block(
    out: &mut dyn Write,
    prefix: &str,
    number: u64,
    block: &[u8],
    habits: &Habits,
    spoils_a_checksum: &mut bool,
) -> io::Result<()> {
    let name = format!("{prefix}/{number:08}");
    tar::write(out, &name, block)?;
    let (ending, mut text) = checksum::of(habits.checksum, block);
    if std::mem::take(spoils_a_checksum) {
        let first = if text.starts_with('0') { "1" } else { "0" };
        text.replace_range(..1, first);
    }
    tar::write(out, &format!("{name}{ending}"), text.as_bytes())
}

/// The checksums that an import accepts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Strictness {
    /// Only correct ones.
    Checked,
    /// Any: the client passed `force`.
    Forced,
}

/// Reads one disk. Gaps are counted in units of `first_length`, the length of the first block of the archive.
pub(crate) fn read(
    stream: &mut dyn Read,
    prefix: &str,
    target: &Target<'_>,
    size_bytes: u64,
    first_length: &mut Option<u64>,
    strictness: Strictness,
) -> io::Result<()> {
    let mut last = "-1".to_owned();
    let mut offset = 0;
    while offset < size_bytes {
        let (name, block) = next(stream)?;
        let unit = *first_length.get_or_insert(block.len() as u64);
        let suffix = name.strip_prefix(prefix).and_then(|rest| rest.strip_prefix('/'));
        let suffix = suffix.ok_or_else(|| unexpected(&name, prefix))?;
        if suffix <= last.as_str() {
            return Err(failure("INTERNAL_ERROR", &["Invalid XVA file"]));
        }
        let numbers = suffix.parse::<i64>().ok().zip(last.parse::<i64>().ok());
        let skipped = numbers.and_then(|(this, last)| u64::try_from(this - last - 1).ok());
        let skipped = skipped.ok_or_else(|| unexpected(&name, prefix))?;
        offset += skipped * unit;
        target.write(offset, &block)?;
        offset += block.len() as u64;
        let (checksum_name, text) = next(stream)?;
        let belongs = checksum_name.starts_with(&name);
        match checksum::fits(&checksum_name, &text, &block).filter(|_| belongs) {
            None => return Err(unexpected(&checksum_name, &name)),
            Some(false) if strictness == Strictness::Checked => {
                return Err(failure("IMPORT_ERROR_SOME_CHECKSUMS_FAILED", &[]));
            }
            Some(_) => {}
        }
        suffix.clone_into(&mut last);
    }
    Ok(())
}

fn next(stream: &mut dyn Read) -> io::Result<(String, Vec<u8>)> {
    tar::read(stream)?.ok_or_else(|| failure("IMPORT_ERROR_PREMATURE_EOF", &[]))
}

fn unexpected(actual: &str, expected: &str) -> io::Error {
    failure("IMPORT_ERROR_UNEXPECTED_FILE", &[expected, actual])
}

fn failure(code: &str, parameters: &[&str]) -> io::Error {
    io::Error::other(Failure::new(code, parameters))
}
