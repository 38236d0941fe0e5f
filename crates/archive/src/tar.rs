//! The tar format of machine archives: plain files in ustar format, with names of up to 255 bytes.
//!
//! Source: POSIX.1-1988, "Extended tar Format"; extensions of GNU tar: sizes beyond 8 GiB in base 256, and long names in separate members (`L`);
//! `path` and `size` of POSIX.1-2001 (`x`).

#![deny(clippy::indexing_slicing)]
#![cfg_attr(not(test), deny(clippy::string_slice))]

use std::borrow::Cow;
use std::io::Read;

use holdfast_block::Record;
use holdfast_hardware::plain_path;

use crate::{Error, Result};

pub(crate) const BLOCK_BYTES: usize = 512;
const BLOCK: u64 = 512;
/// Limit of a long name in a separate member.
const LONG_NAME_BYTES_MAX: u64 = 64 << 10;

/// A file in an archive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Member {
    pub(crate) name: String,
    pub(crate) size_bytes: u64,
    /// The offset of its header.
    pub(crate) offset: u64,
}

/// Reads an archive sequentially.
pub(crate) struct TarReader<R> {
    stream: R,
    /// Bytes read.
    at: u64,
    /// Unread bytes of the member.
    left: u64,
    /// Bytes between the member's end and the next header.
    padding: u64,
    /// Whether the end was read.
    is_finished: bool,
    /// The folder that names are relative to, with a trailing slash.
    folder: String,
}

impl<R: Read> TarReader<R> {
    /// From now on, names of members in `folder`, which ends with a slash, are relative to it.
    pub(crate) fn set_base_folder(&mut self, folder: &str) {
        folder.clone_into(&mut self.folder);
    }

    fn name(&self, full: String) -> String {
        let name = plain_name(full);
        match name.strip_prefix(&self.folder) {
            Some(within) if !self.folder.is_empty() => within.to_owned(),
            _ => name,
        }
    }

    pub(crate) fn new(stream: R) -> Self {
        Self {
            stream,
            at: 0,
            left: 0,
            padding: 0,
            is_finished: false,
            folder: String::new(),
        }
    }

    /// Unread bytes of the member.
    pub(crate) fn remaining_bytes(&self) -> u64 {
        self.left
    }

    /// Bytes read so far.
    pub(crate) fn offset(&self) -> u64 {
        self.at
    }

    /// The next file, or `None` at the end, after which the stream is read to its end. Skips unread bytes of the previous file.
    pub(crate) fn next(&mut self) -> Result<Option<Member>> {
        let (mut long_name, mut long_size) = (None, None);
        if self.is_finished {
            return Ok(None);
        }
        loop {
            self.skip(self.left + self.padding)?;
            (self.left, self.padding) = (0, 0);
            let offset = self.at;
            let mut header = [0; BLOCK_BYTES];
            self.fill(&mut header, "the header of a member")?;
            if header.iter().all(|byte| *byte == 0) {
                self.is_finished = true;
                // An archive that begins with the end marker is empty, even if data follows.
                if offset > 0 {
                    self.read_to_end()?;
                }
                return Ok(None);
            }
            let header = TarHeader::parse(&header, offset)?;
            let size_bytes = long_size.take().unwrap_or(header.size_bytes);
            self.left = size_bytes;
            self.padding = size_bytes.next_multiple_of(BLOCK).saturating_sub(size_bytes);
            match header.kind {
                b'L' => long_name = Some(self.read_name(offset)?),
                b'x' => {
                    let (name, size) = self.read_attributes(offset)?;
                    long_name = name.or(long_name);
                    long_size = size;
                }
                b'0' | 0 | b'7' => {
                    return Ok(Some(Member {
                        name: self.name(long_name.take().unwrap_or(header.name)),
                        size_bytes,
                        offset,
                    }));
                }
                // Folders, global attributes and long names of link targets have no data.
                b'5' => long_name = None,
                b'g' | b'K' => {}
                // If a link were ignored, its data would become zeroes in a disk.
                kind => {
                    let name = long_name.take().unwrap_or(header.name);
                    let what = match kind {
                        b'1' | b'2' => "a link to another member".to_owned(),
                        b'S' => "a member with holes".to_owned(),
                        kind => format!("a member of type {:?}", char::from(kind)),
                    };
                    return Err(special(&format!("{what} ({name:?})")));
                }
            }
        }
    }

    fn read_name(&mut self, offset: u64) -> Result<String> {
        let bytes = self.read_whole(LONG_NAME_BYTES_MAX)?;
        let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
        let name = bytes.get(..end).unwrap_or_default().to_vec();
        String::from_utf8(name).map_err(|_| corrupt("name of a member", offset, "it is not UTF-8"))
    }

    /// Name and size, if the attributes have them.
    fn read_attributes(&mut self, offset: u64) -> Result<(Option<String>, Option<u64>)> {
        let bytes = self.read_whole(LONG_NAME_BYTES_MAX)?;
        let (mut name, mut size) = (None, None);
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            let (key, value, behind) = first_attribute(rest)
                .ok_or_else(|| corrupt("attributes of a member", offset, "one is not as long as it says"))?;
            rest = behind;
            let text = std::str::from_utf8(value);
            match key {
                b"path" => {
                    let text = text.map_err(|_| corrupt("name of a member", offset, "it is not UTF-8"))?;
                    name = Some(text.to_owned());
                }
                b"size" => {
                    let parsed = text.ok().and_then(|text| text.parse().ok());
                    let parsed = parsed.filter(|size| i64::try_from(*size).is_ok());
                    let shown = String::from_utf8_lossy(value);
                    size = Some(parsed.ok_or_else(|| corrupt("size of a member", offset, format!("{shown:?}")))?);
                }
                // The content begins with a table of the data ranges.
                key if key.starts_with(b"GNU.sparse.") => return Err(special("a member with holes")),
                _ => {}
            }
        }
        Ok((name, size))
    }

    /// The whole member, if it is not longer than `bytes_max`.
    pub(crate) fn read_whole(&mut self, bytes_max: u64) -> Result<Vec<u8>> {
        self.read_whole_into(Vec::new(), bytes_max)
    }

    /// The same, with a reused buffer.
    pub(crate) fn read_whole_into(&mut self, mut bytes: Vec<u8>, bytes_max: u64) -> Result<Vec<u8>> {
        if self.left > bytes_max {
            return Err(corrupt(
                "member",
                self.at,
                format!("it has {} bytes, and at most {bytes_max} make sense", self.left),
            ));
        }
        bytes.clear();
        self.read_into(&mut bytes)?;
        Ok(bytes)
    }

    /// Appends the rest of the member to `bytes`. The caller has checked its length.
    fn read_into(&mut self, bytes: &mut Vec<u8>) -> Result<()> {
        let left = self.left;
        let at = self.at;
        let read = self.stream.by_ref().take(left).read_to_end(bytes);
        let read = read.map_err(|source| read_error(source, "a member", at))? as u64;
        self.at += read;
        self.left -= read;
        if self.left > 0 {
            return Err(Error::CutOff {
                what: "a member",
                offset: self.at,
            });
        }
        Ok(())
    }

    /// Checks that the member was complete, after it was read as a stream.
    pub(crate) fn check_read(&self) -> Result<()> {
        if self.left == 0 {
            return Ok(());
        }
        Err(Error::CutOff {
            what: "a member",
            offset: self.at,
        })
    }

    fn fill(&mut self, buffer: &mut [u8], what: &'static str) -> Result<()> {
        let at = self.at;
        self.stream
            .read_exact(buffer)
            .map_err(|source| read_error(source, what, at))?;
        self.at += buffer.len() as u64;
        Ok(())
    }

    fn skip(&mut self, count: u64) -> Result<()> {
        let copied = std::io::copy(&mut self.stream.by_ref().take(count), &mut std::io::sink());
        let copied = copied.map_err(|source| read_error(source, "a member", self.at))?;
        self.at += copied;
        if copied < count {
            return Err(Error::CutOff {
                what: "a member",
                offset: self.at,
            });
        }
        Ok(())
    }

    /// Reads the padding after the end marker: the writer must not get a broken pipe, and checksums of a packed stream
    /// follow it.
    fn read_to_end(&mut self) -> Result<()> {
        let copied = std::io::copy(&mut self.stream, &mut std::io::sink());
        self.at += copied.map_err(|source| read_error(source, "the end", self.at))?;
        Ok(())
    }
}

impl<R: Read> Read for TarReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let most = usize::try_from(self.left).unwrap_or(usize::MAX).min(buffer.len());
        let count = self.stream.read(buffer.get_mut(..most).unwrap_or_default())?;
        self.at += count as u64;
        self.left -= count as u64;
        Ok(count)
    }
}

/// Splits off the first `LENGTH KEY=VALUE\n`: returns key, value, and the rest. A value may contain any bytes, even line ends: only the length
/// determines its end.
pub(crate) fn first_attribute(bytes: &[u8]) -> Option<(&[u8], &[u8], &[u8])> {
    let blank = bytes.iter().position(|byte| *byte == b' ')?;
    let length: usize = std::str::from_utf8(bytes.get(..blank)?).ok()?.parse().ok()?;
    let (attribute, behind) = bytes.split_at_checked(length)?;
    let text = attribute.get(blank + 1..)?.strip_suffix(b"\n")?;
    let equals = text.iter().position(|byte| *byte == b'=')?;
    Some((text.get(..equals)?, text.get(equals + 1..)?, behind))
}

fn special(feature: &str) -> Error {
    Error::Unsupported {
        feature: feature.to_owned(),
        detail: "a machine archive has plain files only; unpack it, and pack it again with tar --hard-dereference -h"
            .to_owned(),
    }
}

/// Splits a name into the folder, with its trailing slash, and the file name.
pub(crate) fn split_folder(name: &str) -> (&str, &str) {
    name.split_at(name.rfind('/').map_or(0, |slash| slash + 1))
}

/// Normalizes a name, such as the leading `./` that `tar -c .` writes. A name that leaves the archive stays unchanged.
pub(crate) fn plain_name(name: String) -> String {
    match plain_path(&name) {
        Some(Cow::Owned(plain)) => plain,
        Some(Cow::Borrowed(_)) | None => name,
    }
}

pub(crate) fn read_error(source: std::io::Error, what: &'static str, offset: u64) -> Error {
    if source.kind() == std::io::ErrorKind::UnexpectedEof {
        Error::CutOff { what, offset }
    } else {
        Error::Read { offset, source }
    }
}

pub(crate) fn corrupt(what: &'static str, offset: u64, detail: impl Into<String>) -> Error {
    Error::Corrupt {
        what,
        offset,
        detail: detail.into(),
    }
}

struct TarHeader {
    name: String,
    size_bytes: u64,
    kind: u8,
}

impl TarHeader {
    fn parse(header: &[u8; BLOCK_BYTES], offset: u64) -> Result<Self> {
        let wrong = |detail: String| corrupt("header of a member", offset, detail);
        let fields = Record::new(header);
        let expected = octal(fields.field::<148, 8>()).ok_or_else(|| wrong("its checksum is no number".to_owned()))?;
        let actual = checksum(header);
        if u64::from(actual) != expected {
            return Err(wrong(format!("its checksum is {actual:o} and should be {expected:o}")));
        }
        let size_bytes = if fields.byte::<124>() & 0x80 == 0 {
            octal(fields.field::<124, 12>())
        } else {
            // Base 256: marked by the first byte; the last eight hold any possible size.
            Some(fields.be_u64::<128>()).filter(|_| *fields.field::<124, 4>() == [0x80, 0, 0, 0])
        };
        let size_bytes = size_bytes.filter(|size| i64::try_from(*size).is_ok());
        let text = |field: &[u8]| -> Result<String> {
            let text = field.split(|byte| *byte == 0).next().unwrap_or_default();
            String::from_utf8(text.to_vec()).map_err(|_| wrong("its name is not UTF-8".to_owned()))
        };
        let (name, prefix) = (text(fields.field::<0, 100>())?, text(fields.field::<345, 155>())?);
        // GNU's format uses the prefix for other fields.
        let has_prefix = fields.field::<257, 6>() == b"ustar\0" && !prefix.is_empty();
        Ok(Self {
            name: if has_prefix { format!("{prefix}/{name}") } else { name },
            size_bytes: size_bytes.ok_or_else(|| wrong("its size is no number".to_owned()))?,
            kind: fields.byte::<156>(),
        })
    }
}

/// Parses octal digits, with blanks before and zeroes or blanks after them; an empty field is 0.
pub(crate) fn octal(field: &[u8]) -> Option<u64> {
    let text = std::str::from_utf8(field).ok()?;
    let digits = text.trim_matches(['\0', ' ']);
    if digits.is_empty() {
        return Some(0);
    }
    u64::from_str_radix(digits, 8).ok()
}

/// The sum of all bytes, with the checksum field as blanks.
pub(crate) fn checksum(header: &[u8; BLOCK_BYTES]) -> u32 {
    let sum = |bytes: &[u8]| bytes.iter().map(|byte| u32::from(*byte)).sum::<u32>();
    let fields = Record::new(header);
    sum(fields.field::<0, 148>()) + 8 * u32::from(b' ') + sum(fields.field::<156, 356>())
}

/// The header of a file, whose name has at most 100 bytes.
#[expect(
    clippy::indexing_slicing,
    reason = "places and lengths are those of the format, and the length of the name was looked at"
)]
pub(crate) fn header(name: &str, size_bytes: u64, time: u64) -> [u8; BLOCK_BYTES] {
    let mut header = [0; BLOCK_BYTES];
    let name = name.as_bytes();
    assert!(name.len() <= 100, "the caller chooses names that fit");
    header[..name.len()].copy_from_slice(name);
    let mut put = |at: usize, text: &str| header[at..at + text.len()].copy_from_slice(text.as_bytes());
    put(100, "0000644\0");
    put(108, "0000000\0");
    put(116, "0000000\0");
    if size_bytes < 1 << 33 {
        put(124, &format!("{size_bytes:011o}\0"));
    }
    put(136, &format!("{:011o}\0", time.min((1 << 33) - 1)));
    put(156, "0");
    put(257, "ustar\0");
    put(263, "00");
    if size_bytes >= 1 << 33 {
        header[124] = 0x80;
        header[128..136].copy_from_slice(&size_bytes.to_be_bytes());
    }
    let sum = checksum(&header);
    header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    header
}

/// Bytes after a file of this size, up to the next header.
pub(crate) fn padding_of(size_bytes: u64) -> usize {
    let padding = size_bytes.next_multiple_of(BLOCK) - size_bytes;
    usize::try_from(padding).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::{TarReader, header, padding_of};
    use crate::Error;

    fn archive(members: &[(&str, &[u8])]) -> Vec<u8> {
        let mut bytes = Vec::new();
        for (name, content) in members {
            bytes.extend(header(name, content.len() as u64, 0));
            bytes.extend(*content);
            bytes.resize(bytes.len() + padding_of(content.len() as u64), 0);
        }
        bytes.resize(bytes.len() + 1024, 0);
        bytes
    }

    #[test]
    fn members_are_read_in_order_and_unread_bytes_are_skipped() {
        let bytes = archive(&[("ova.xml", b"text"), ("Ref:1/00000000", &[7; 513]), ("empty", b"")]);
        let mut reader = TarReader::new(&bytes[..]);
        assert_eq!(reader.next().unwrap().unwrap().name, "ova.xml");
        assert_eq!(reader.read_whole(4).unwrap(), b"text");
        let member = reader.next().unwrap().unwrap();
        assert_eq!((member.size_bytes, member.offset), (513, 1024));
        assert_eq!(reader.next().unwrap().unwrap().name, "empty");
        assert_eq!(reader.next().unwrap(), None);
        assert_eq!(reader.offset(), bytes.len() as u64);
    }

    #[test]
    fn truncation_at_every_length_is_an_error() {
        let bytes = archive(&[("one", &[1; 700]), ("two", b"2")]);
        for length in 0..bytes.len() - 1024 + 511 {
            let mut reader = TarReader::new(&bytes[..length]);
            let error = loop {
                match reader.next() {
                    Ok(Some(_)) => {}
                    Ok(None) => panic!("an end at {length} bytes"),
                    Err(error) => break error,
                }
            };
            assert!(matches!(error, Error::CutOff { .. }), "{length}: {error}");
        }
    }

    #[test]
    fn a_changed_header_is_detected_and_large_sizes_are_read() {
        let mut bytes = archive(&[("one", b"1")]);
        bytes[3] ^= 1;
        let error = TarReader::new(&bytes[..]).next().unwrap_err().to_string();
        assert!(error.contains("checksum"), "{error}");
        for size in [0, 1, (1 << 33) - 1, 1 << 33, 1 << 50] {
            let bytes = header("disk.vmdk", size, 1);
            assert_eq!(TarReader::new(&bytes[..]).next().unwrap().unwrap().size_bytes, size);
        }
    }

    #[test]
    fn an_archive_that_begins_with_its_end_marker_is_empty() {
        let mut reader = TarReader::new(std::io::repeat(0));
        assert_eq!(reader.next().unwrap(), None);
        assert_eq!(reader.next().unwrap(), None);
    }

    /// Links among the blocks of a disk were read as zeroes.
    #[test]
    fn links_are_refused_and_folders_are_skipped() {
        let of_kind = |kind: u8| {
            let mut header = header("a", 0, 0);
            header[156] = kind;
            let sum = super::checksum(&header);
            header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
            [&header[..], &archive(&[("b", b"content")])].concat()
        };
        for kind in *b"123467S" {
            let bytes = of_kind(kind);
            let mut reader = TarReader::new(&bytes[..]);
            let found = reader.next();
            let is_plain = kind == b'7';
            assert_eq!(found.is_ok(), is_plain, "{}: {found:?}", char::from(kind));
        }
        let bytes = of_kind(b'5');
        assert_eq!(TarReader::new(&bytes[..]).next().unwrap().unwrap().name, "b");
    }

    fn with_attributes(attributes: &[u8]) -> Vec<u8> {
        let mut bytes = header("attributes", attributes.len() as u64, 0);
        bytes[156] = b'x';
        let sum = super::checksum(&bytes);
        bytes[148..154].copy_from_slice(format!("{sum:06o}").as_bytes());
        let mut bytes = bytes.to_vec();
        bytes.extend(attributes);
        bytes.resize(bytes.len().next_multiple_of(512), 0);
        bytes.extend(archive(&[("short", &[7; 600])]));
        bytes
    }

    /// A line end within a comment changed the size of a member to one byte.
    #[test]
    fn attributes_are_split_by_their_length() {
        let bytes = with_attributes(b"32 comment=two lines\n99 size=1\n\n15 path=a/../b\n");
        let mut reader = TarReader::new(&bytes[..]);
        let member = reader.next().unwrap().unwrap();
        assert_eq!((member.name.as_str(), member.size_bytes), ("b", 600));
        assert_eq!(reader.next().unwrap(), None);
        for wrong in [
            &b"99 size=1\n"[..],
            b"0 size=1\n",
            b"8 size=1\n",
            b"11 size=1\n",
            b"size=1\n",
            b"-1 size=1\n",
            b"10 size=x\n",
        ] {
            let bytes = with_attributes(wrong);
            let error = TarReader::new(&bytes[..]).next().unwrap_err();
            assert!(matches!(error, Error::Corrupt { .. }), "{wrong:?}: {error}");
        }
        let bytes = with_attributes(b"22 GNU.sparse.major=1\n");
        let error = TarReader::new(&bytes[..]).next().unwrap_err();
        assert!(error.to_string().contains("a member with holes"), "{error}");
    }

    #[test]
    fn long_names_are_read_as_gnu_and_posix_write_them() {
        let long = "d".repeat(150);
        let mut gnu = header("././@LongLink", 151, 0);
        gnu[156] = b'L';
        let sum = super::checksum(&gnu);
        gnu[148..154].copy_from_slice(format!("{sum:06o}").as_bytes());
        let mut bytes = gnu.to_vec();
        bytes.extend(long.as_bytes());
        bytes.resize(1024, 0);
        bytes.extend(archive(&[("short", b"1")]));
        let mut reader = TarReader::new(&bytes[..]);
        assert_eq!(reader.next().unwrap().unwrap().name, long);
        assert_eq!(reader.next().unwrap(), None);
    }
}
