//! The possible paths of the parent of a differencing image: eight locators, and a name.

use holdfast_block::{Record, to_usize};

use super::SECTOR_BYTES;
use crate::Result;
use crate::file::ImageFile;
use crate::model::bytes::{be_utf16, le_utf16, rows};
use crate::model::windows_path::{from_windows, to_windows};

const LOCATOR_BYTES: usize = 24;
/// Maximum length of a path.
const PATH_BYTES_MAX: u64 = 4096;
/// A relative Windows path in UTF-16, little-endian.
const RELATIVE: u32 = u32::from_be_bytes(*b"W2ru");
/// An absolute Windows path in UTF-16, little-endian.
const ABSOLUTE: u32 = u32::from_be_bytes(*b"W2ku");
/// A file URL in UTF-8, as XenServer writes it.
const URL: u32 = u32::from_be_bytes(*b"MacX");

/// The paths in `locators`, relative ones first, then the bare `name`; converted to paths of this system.
pub(super) fn names(file: &dyn ImageFile, locators: &[u8], name: &[u8]) -> Result<Vec<String>> {
    let mut found: Vec<(u8, String)> = Vec::new();
    for locator in rows::<LOCATOR_BYTES>(locators, 0).iter().take(8) {
        let locator = Record::new(locator);
        let (code, length, offset) = (locator.be_u32::<0>(), locator.be_u32::<8>(), locator.be_u64::<16>());
        let length = u64::from(length);
        if !matches!(code, RELATIVE | ABSOLUTE | URL) || length == 0 || length > PATH_BYTES_MAX {
            continue;
        }
        let mut bytes = vec![0; to_usize(length)];
        file.read_at(&mut bytes, offset)?;
        let path = match code {
            RELATIVE => Some((0, from_windows(&le_utf16(&bytes)))),
            URL => from_url(&bytes).map(|path| (1, path)),
            _ => Some((2, from_windows(&le_utf16(&bytes)))),
        };
        found.extend(path);
    }
    found.push((3, from_windows(&be_utf16(name))));
    found.sort_by_key(|(rank, _)| *rank);
    let mut names: Vec<String> = Vec::new();
    for (_, path) in found {
        if !path.is_empty() && !names.contains(&path) {
            names.push(path);
        }
    }
    Ok(names)
}

/// Parses a file URL. XenServer writes `file://./NAME` for a file in the folder of the image.
fn from_url(bytes: &[u8]) -> Option<String> {
    let text = String::from_utf8_lossy(bytes);
    let path = text.trim_end_matches('\0').strip_prefix("file://")?.to_owned();
    Some(path.strip_prefix("./").map_or(path.clone(), str::to_owned))
}

/// Builds the locators of a parent, and their data, which begins at `offset` and consists of whole sectors.
pub(super) fn to_bytes(path: &str, offset: u64) -> (Vec<u8>, Vec<u8>) {
    let windows: Vec<u8> = to_windows(path).encode_utf16().flat_map(u16::to_le_bytes).collect();
    let url = if path.starts_with('/') {
        format!("file://{path}")
    } else {
        format!("file://./{path}")
    };
    let (mut locators, mut data) = (Vec::new(), Vec::new());
    for (code, bytes) in [(RELATIVE, windows), (URL, url.into_bytes())] {
        let room = bytes.len().next_multiple_of(to_usize(SECTOR_BYTES));
        let number = |value: usize| u32::try_from(value).unwrap_or(u32::MAX).to_be_bytes();
        locators.extend_from_slice(&code.to_be_bytes());
        locators.extend_from_slice(&number(room));
        locators.extend_from_slice(&number(bytes.len()));
        locators.extend_from_slice(&[0; 4]);
        locators.extend_from_slice(&(offset + data.len() as u64).to_be_bytes());
        let end = data.len() + room;
        data.extend_from_slice(&bytes);
        data.resize(end, 0);
    }
    (locators, data)
}

#[cfg(test)]
mod tests {
    use super::{names, to_bytes};
    use crate::file::ImageFile as _;
    use crate::file::memory::MemoryFile;

    #[test]
    fn paths_round_trip() {
        for path in ["parent.vhd", "below/Größe.vhd", "../web1/base.vhd"] {
            let (locators, data) = to_bytes(path, 1536);
            let file = MemoryFile::default();
            file.write_at(&data, 1536).unwrap();
            assert_eq!(names(&file, &locators, &[]).unwrap(), [path]);
        }
    }
}
