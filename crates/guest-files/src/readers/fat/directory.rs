//! Directory entries and their names.
//!
//! A long name is stored in entries before the entry of its file, last part first, 13 letters of UTF-16 in each. They
//! have a checksum of the short name: if it differs, a program without long names changed the file, and its short name
//! counts.

use super::codepage::letter_of;
use super::table::FatWidth;
use crate::fields::{Fields, utf8_of_utf16};
use crate::{DirectoryEntry, Error, ModifiedTime, Result};

/// Length of an entry.
pub(super) const ENTRY_BYTES: usize = 32;

const ATTRIBUTE_LABEL: u8 = 0x08;
const ATTRIBUTE_DIRECTORY: u8 = 0x10;
const ATTRIBUTES_LONG_NAME: u8 = 0x0f;
const MARK_END: u8 = 0;
const MARK_DELETED: u8 = 0xe5;
const PART_LAST: u8 = 0x40;
/// Long names have at most 255 letters.
const PART_COUNT_MAX: u8 = 20;
/// Flags for names in lower case, as Windows NT writes them.
const LOWER_NAME: u8 = 0x08;
const LOWER_EXTENSION: u8 = 0x10;

/// The entry of a file or directory.
#[derive(Debug, Clone)]
pub(super) struct ShortEntry {
    name: [u8; 11],
    attributes: u8,
    case_flags: u8,
    time: u16,
    date: u16,
    pub(super) first_cluster: u32,
    pub(super) size_bytes: u32,
}

impl ShortEntry {
    pub(super) fn parse(bytes: &[u8], width: FatWidth) -> Result<Self> {
        let fields = Fields::new("FAT directory entry", bytes);
        let mut name = [0; 11];
        name.copy_from_slice(fields.bytes(0, 11)?);
        let high = if width == FatWidth::Bits32 {
            u32::from(fields.u16(20)?) << 16
        } else {
            0
        };
        Ok(Self {
            name,
            attributes: fields.u8(11)?,
            case_flags: fields.u8(12)?,
            time: fields.u16(22)?,
            date: fields.u16(24)?,
            first_cluster: high | u32::from(fields.u16(26)?),
            size_bytes: fields.u32(28)?,
        })
    }

    pub(super) fn is_directory(&self) -> bool {
        self.attributes & ATTRIBUTE_DIRECTORY != 0
    }

    /// Whether it is neither deleted, nor a label, nor a part of a long name.
    pub(super) fn names_a_file(&self) -> bool {
        let [first, ..] = self.name;
        !matches!(first, MARK_END | MARK_DELETED)
            && self.attributes & ATTRIBUTES_LONG_NAME != ATTRIBUTES_LONG_NAME
            && self.attributes & ATTRIBUTE_LABEL == 0
    }

    /// The time of the last change; none if it is not set.
    pub(super) fn modified(&self) -> Option<ModifiedTime> {
        dos_time(self.date, self.time)
    }

    fn short_name(&self) -> Vec<u8> {
        let (base, extension) = self.name.split_at(8);
        let mut name = text_of(base, self.case_flags & LOWER_NAME != 0);
        let extension = text_of(extension, self.case_flags & LOWER_EXTENSION != 0);
        if !extension.is_empty() {
            name.push('.');
            name.push_str(&extension);
        }
        name.into_bytes()
    }

    fn checksum(&self) -> u8 {
        self.name
            .iter()
            .fold(0u8, |sum, byte| sum.rotate_right(1).wrapping_add(*byte))
    }
}

/// A part of a short name; a first byte of 05 stands for E5.
fn text_of(bytes: &[u8], is_lower: bool) -> String {
    let end = bytes.iter().rposition(|byte| *byte != b' ').map_or(0, |last| last + 1);
    let bytes = bytes.get(..end).unwrap_or_default();
    let letters = bytes.iter().enumerate().map(|(at, byte)| match (at, byte) {
        (0, 0x05) => letter_of(MARK_DELETED),
        (_, byte) if is_lower => letter_of(byte.to_ascii_lowercase()),
        (_, byte) => letter_of(*byte),
    });
    letters.collect()
}

/// A date and a time of day, in steps of two seconds; none if the date is not set.
pub(super) fn dos_time(date: u16, time: u16) -> Option<ModifiedTime> {
    let (day, month) = (u32::from(date & 0x1f), u32::from(date >> 5 & 0xf));
    if day == 0 || !(1..=12).contains(&month) {
        return None;
    }
    let days = days_since_1970(1980 + i64::from(date >> 9), month, day);
    let (hour, minute) = (i64::from(time >> 11), i64::from(time >> 5 & 0x3f));
    let seconds = hour * 3600 + minute * 60 + i64::from(time & 0x1f) * 2;
    Some(ModifiedTime {
        seconds: days * 86_400 + seconds,
        nanoseconds: 0,
    })
}

/// Days from 1970-01-01 to a date of the Gregorian calendar.
fn days_since_1970(year: i64, month: u32, day: u32) -> i64 {
    // Years begin in March, so that a leap day is the last of its year.
    let (year, month) = if month > 2 {
        (year, i64::from(month) - 3)
    } else {
        (year - 1, i64::from(month) + 9)
    };
    let days_of_years = year * 365 + year / 4 - year / 100 + year / 400;
    days_of_years + (month * 153 + 2) / 5 + i64::from(day) - 1 - 719_468
}

/// What an entry adds to a directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum NamedEntry {
    /// The directory ends here.
    Last,
    /// Nothing by itself: deleted, a label, or a part of a name.
    None,
    /// A file or directory of this name.
    File(Vec<u8>),
}

/// Joins the entries of a directory to names.
#[derive(Debug)]
pub(super) struct NameReader {
    width: FatWidth,
    /// Parts of a long name, first part last.
    parts: Vec<[u8; 26]>,
    /// The number of the next part; 0 if the name is complete.
    expected: u8,
    checksum: u8,
}

impl NameReader {
    pub(super) fn new(width: FatWidth) -> Self {
        Self {
            width,
            parts: Vec::new(),
            expected: 0,
            checksum: 0,
        }
    }

    /// Takes the next entry of the directory.
    pub(super) fn next(&mut self, bytes: &[u8]) -> Result<NamedEntry> {
        let entry = ShortEntry::parse(bytes, self.width)?;
        let [first, ..] = entry.name;
        if first == MARK_END {
            return Ok(NamedEntry::Last);
        }
        if first != MARK_DELETED && entry.attributes & 0x3f == ATTRIBUTES_LONG_NAME {
            self.add_part(first, bytes)?;
            return Ok(NamedEntry::None);
        }
        let parts = std::mem::take(&mut self.parts);
        let is_complete = self.expected == 0 && !parts.is_empty() && self.checksum == entry.checksum();
        self.expected = 0;
        if !entry.names_a_file() {
            return Ok(NamedEntry::None);
        }
        let name = if is_complete {
            long_name(&parts)
        } else {
            entry.short_name()
        };
        if name == b"." || name == b".." {
            return Ok(NamedEntry::None);
        }
        if !DirectoryEntry::is_valid_name(&name) {
            return Err(Error::damaged("FAT directory", "a name in it is invalid"));
        }
        Ok(NamedEntry::File(name))
    }

    fn add_part(&mut self, order: u8, bytes: &[u8]) -> Result<()> {
        let fields = Fields::new("FAT directory entry", bytes);
        let checksum = fields.u8(13)?;
        let number = order & !PART_LAST;
        if order & PART_LAST != 0 {
            self.parts.clear();
            self.expected = number;
            self.checksum = checksum;
        }
        if number == 0 || number > PART_COUNT_MAX || number != self.expected || checksum != self.checksum {
            self.parts.clear();
            self.expected = 0;
            return Ok(());
        }
        let mut part = [0; 26];
        let stored = [fields.bytes(1, 10)?, fields.bytes(14, 12)?, fields.bytes(28, 4)?].concat();
        part.copy_from_slice(&stored);
        self.parts.push(part);
        self.expected = number - 1;
        Ok(())
    }
}

/// A long name ends at a letter of zero.
fn long_name(parts: &[[u8; 26]]) -> Vec<u8> {
    let units = parts.iter().rev().flat_map(|part| part.chunks_exact(2));
    let units: Vec<u8> = units.take_while(|unit| *unit != [0, 0]).flatten().copied().collect();
    utf8_of_utf16(&units)
}

#[cfg(test)]
mod tests {
    use super::days_since_1970;

    #[test]
    fn days_are_those_of_the_calendar() {
        assert_eq!(days_since_1970(1970, 1, 1), 0);
        assert_eq!(days_since_1970(2000, 2, 29), 11_016);
        assert_eq!(days_since_1970(2026, 11, 27), 20_784);
    }
}
