//! The tar archive: ustar, with members one after the other.

use std::io::{self, Read, Write};

/// Size of a header; members are padded to a multiple of it.
const UNIT_BYTES: u64 = 512;
/// Limit of the length of a member: blocks are 1 MiB, the `ova.xml` of a large machine has some hundred KiB.
const MEMBER_BYTES_MAX: u64 = 64 << 20;

/// Writes a member.
pub(crate) fn write(out: &mut dyn Write, name: &str, content: &[u8]) -> io::Result<()> {
    let mut header = [0_u8; 512];
    let fields: [(usize, &[u8]); 9] = [
        (0, name.as_bytes()),
        (100, b"0000400\0"),
        (108, b"0000000\0"),
        (116, b"0000000\0"),
        (136, b"00000000000\0"),
        (148, b"        "),
        (156, b"0"),
        (257, b"ustar\x0000"),
        (124, &octal(content.len())),
    ];
    for (offset, field) in fields {
        header[offset..offset + field.len()].copy_from_slice(field);
    }
    let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
    header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    out.write_all(&header)?;
    out.write_all(content)?;
    let rest = content.len().next_multiple_of(512) - content.len();
    out.write_all(&[0; 512][..rest])
}

fn octal(length: usize) -> [u8; 12] {
    let mut digits = [0; 12];
    digits[..11].copy_from_slice(format!("{length:011o}").as_bytes());
    digits
}

/// Writes the end of the archive.
pub(crate) fn write_end(out: &mut dyn Write) -> io::Result<()> {
    out.write_all(&[0; 1024])
}

/// Reads the next member; `None` at the end of the archive.
pub(crate) fn read(stream: &mut dyn Read) -> io::Result<Option<(String, Vec<u8>)>> {
    let mut header = [0; 512];
    stream.read_exact(&mut header)?;
    if holdfast_block::is_zero(&header) {
        return Ok(None);
    }
    let bad = || io::Error::other("no header of tar");
    let sum: u32 = (0..512)
        .map(|index| {
            if (148..156).contains(&index) {
                32
            } else {
                u32::from(header[index])
            }
        })
        .sum();
    if number(&header[148..156]) != Some(u64::from(sum)) {
        return Err(bad());
    }
    let length = number(&header[124..136])
        .filter(|length| *length <= MEMBER_BYTES_MAX)
        .ok_or_else(bad)?;
    let name_length = header[..100].iter().position(|byte| *byte == 0).unwrap_or(100);
    let name = std::str::from_utf8(&header[..name_length])
        .map_err(|_| bad())?
        .to_owned();
    let mut content = vec![0; holdfast_block::to_usize(length)];
    stream.read_exact(&mut content)?;
    let mut rest = [0; 512];
    let rest_length = holdfast_block::to_usize(length.next_multiple_of(UNIT_BYTES) - length);
    stream.read_exact(&mut rest[..rest_length])?;
    Ok(Some((name, content)))
}

fn number(field: &[u8]) -> Option<u64> {
    let text = std::str::from_utf8(field).ok()?;
    u64::from_str_radix(text.trim_matches(['\0', ' ']), 8).ok()
}

#[cfg(test)]
mod tests {
    use super::{read, write, write_end};

    #[test]
    fn written_values_are_read_again() {
        let mut bytes = Vec::new();
        write(&mut bytes, "ova.xml", b"<value/>").unwrap();
        write(&mut bytes, "Ref:1/00000000", &[7; 512]).unwrap();
        write_end(&mut bytes).unwrap();
        let mut stream = bytes.as_slice();
        assert_eq!(
            read(&mut stream).unwrap(),
            Some(("ova.xml".to_owned(), b"<value/>".to_vec()))
        );
        assert_eq!(read(&mut stream).unwrap().unwrap().1.len(), 512);
        assert_eq!(read(&mut stream).unwrap(), None);
        bytes[0] ^= 1;
        assert!(read(&mut bytes.as_slice()).is_err());
    }
}
