//! Detects the format of a file by its content and name.

#![deny(clippy::indexing_slicing)]
#![cfg_attr(not(test), deny(clippy::string_slice))]

use std::path::Path;

use holdfast_block::to_usize;

use crate::file::ImageFile;
use crate::formats::ploop::descriptor::is_descriptor;
use crate::model::format::{HEAD_BYTES, NameHint};
use crate::{Error, Format, Result};

/// The format of a file that starts with `head` and ends with `tail`.
///
/// A raw disk whose guest wrote a magic number into its first sector looks like an image: a caller that knows the
/// format must not use this. A fixed VHD has its magic number at the end only.
pub(crate) fn of_content(head: &[u8], tail: &[u8]) -> Format {
    let u32_at = |offset: usize| -> u32 {
        head.get(offset..offset + 4)
            .map_or(0, |bytes| u32::from_be_bytes(bytes.try_into().expect("four bytes")))
    };
    if head.starts_with(b"QFI\xfb") {
        return if u32_at(4) == 1 { Format::Qcow } else { Format::Qcow2 };
    }
    let vdi_signature = head.get(0x40..0x44) == Some(&[0x7f, 0x10, 0xda, 0xbe]);
    match head {
        _ if vdi_signature => Format::Vdi,
        _ if head.starts_with(b"QED\0") => Format::Qed,
        _ if head.starts_with(b"vhdxfile") => Format::Vhdx,
        _ if head.starts_with(b"KDMV") || head.starts_with(b"COWD") || is_vmdk_text(head) => Format::Vmdk,
        _ if head.starts_with(b"WithoutFreeSpace") || head.starts_with(b"WithouFreSpacExt") => Format::Parallels,
        _ if is_descriptor(head) => Format::Parallels,
        _ if head.starts_with(b"LUKS\xba\xbe") => Format::Luks,
        _ if head.starts_with(b"conectix") || tail.starts_with(b"conectix") => Format::Vhd,
        _ => Format::Raw,
    }
}

/// Whether a file begins like a VMDK descriptor: with its usual first line, or, as QEMU accepts, with comments and
/// blank lines before the line of the version.
pub(crate) fn is_vmdk_text(head: &[u8]) -> bool {
    let text = head.trim_ascii_start();
    if text.starts_with(b"# Disk DescriptorFile") {
        return true;
    }
    let mut lines = text.split(|byte| *byte == b'\n').map(<[u8]>::trim_ascii);
    let first = lines.find(|line| !line.is_empty() && !line.starts_with(b"#"));
    first.is_some_and(|line| {
        let (key, value) = line.split_at(line.len().min(b"version".len()));
        let value = value
            .trim_ascii_start()
            .strip_prefix(b"=")
            .map(<[u8]>::trim_ascii_start);
        key.eq_ignore_ascii_case(b"version") && value.and_then(<[u8]>::first).is_some_and(u8::is_ascii_digit)
    })
}

/// A detected format, and whether the file name confirms it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FormatGuess {
    pub(crate) format: Format,
    /// Whether only the content indicates the format, which the guest of a raw disk controls. Such an image opens no
    /// other file.
    pub(crate) is_by_content_alone: bool,
    /// The format of the content, where the name may be that of a raw disk.
    pub(crate) doubt: Option<Format>,
}

impl FormatGuess {
    /// The format for changing the file.
    ///
    /// # Errors
    /// The file may be a raw disk: what looks like metadata may be data of its guest.
    pub(crate) fn to_write(self, path: &Path) -> Result<Format> {
        match self.doubt {
            None => Ok(self.format),
            Some(looks_like) => Err(Error::NameContradicts {
                image: path.display().to_string(),
                called: Format::Raw.name(),
                format: looks_like.name(),
            }),
        }
    }
}

/// Detects the format of the file at `path`.
///
/// # Errors
/// Name and content contradict each other.
pub(crate) fn guess(file: &dyn ImageFile, path: &Path) -> Result<FormatGuess> {
    let format = of_file(file)?;
    let name = NameHint::of(path);
    let guessed = |format, is_by_content_alone, doubt| FormatGuess {
        format,
        is_by_content_alone,
        doubt,
    };
    let refuse = |called: Format| {
        Err(Error::NameContradicts {
            image: path.display().to_string(),
            called: called.name(),
            format: format.name(),
        })
    };
    match (name, format) {
        // No image is that small; only the descriptor of a Parallels disk can be, and parsing it gives a better error.
        (NameHint::Format(named), Format::Raw)
            if !matches!(named, Format::Raw | Format::Parallels) && file.length_bytes()? < TAIL_BYTES =>
        {
            refuse(named)
        }
        (_, Format::Raw) => Ok(guessed(format, false, None)),
        (NameHint::Format(named), format) => Ok(guessed(format, named != format, None)),
        // A fixed VHD has its footer at the end only; without it, all bytes of the raw disk are present.
        (NameHint::Raw | NameHint::Disk, Format::Vhd) if !begins_as_vhd(file)? => {
            Ok(guessed(Format::Raw, false, Some(format)))
        }
        (NameHint::Raw, _) => refuse(Format::Raw),
        (NameHint::Disk, format) => Ok(guessed(format, true, Some(format))),
        (NameHint::Nothing, format) => Ok(guessed(format, true, None)),
    }
}

pub(crate) fn begins_as_vhd(file: &dyn ImageFile) -> Result<bool> {
    let mut head = [0; 8];
    file.read_at(&mut head, 0)?;
    Ok(&head == b"conectix")
}

pub(crate) fn of_file(file: &dyn ImageFile) -> Result<Format> {
    let length_bytes = file.length_bytes()?;
    let mut head = vec![0; to_usize(HEAD_BYTES.min(length_bytes))];
    file.read_at(&mut head, 0)?;
    // Old versions of Virtual PC wrote a footer of 511 bytes after whole sectors.
    let tail_bytes = if length_bytes % TAIL_BYTES == TAIL_BYTES - 1 {
        TAIL_BYTES - 1
    } else {
        TAIL_BYTES.min(length_bytes)
    };
    let mut tail = vec![0; to_usize(tail_bytes)];
    file.read_at(&mut tail, length_bytes - tail_bytes)?;
    Ok(of_content(&head, &tail))
}

/// Bytes at the end of a file that [`of_content`] needs.
pub(crate) const TAIL_BYTES: u64 = 512;

#[cfg(test)]
mod tests {
    use super::of_content;
    use crate::Format;

    #[test]
    fn magic_numbers_are_detected_and_the_rest_is_raw() {
        let with = |offset: usize, magic: &[u8]| {
            let mut head = vec![0; 1024];
            head[offset..offset + magic.len()].copy_from_slice(magic);
            of_content(&head, &[])
        };
        assert_eq!(with(0, b"QFI\xfb\0\0\0\x03"), Format::Qcow2);
        assert_eq!(with(0, b"QFI\xfb\0\0\0\x01"), Format::Qcow);
        assert_eq!(with(0x40, &0xbeda_107f_u32.to_le_bytes()), Format::Vdi);
        assert_eq!(with(0, b"vhdxfile"), Format::Vhdx);
        assert_eq!(with(0, b"KDMV"), Format::Vmdk);
        for text in [
            "# Disk DescriptorFile\n",
            "# Disk Descriptor File\nversion=1\nCID=fffffffe\n",
            "#disk descriptorfile\r\n\r\nversion=3\r\n",
            "# written by a converter\n#\n  \nVersion = 1\n",
            "\nversion=2\n",
        ] {
            assert_eq!(with(0, text.as_bytes()), Format::Vmdk, "{text}");
        }
        for text in [
            "# a script\nset -e\n",
            "version\n",
            "version=one\n",
            "# version=1\n",
            "diversion=1\n",
        ] {
            assert_eq!(with(0, text.as_bytes()), Format::Raw, "{text}");
        }
        assert_eq!(with(0, b"WithoutFreeSpace"), Format::Parallels);
        for descriptor in [
            "<Parallels_disk_image Version=\"1.0\">",
            "<?xml version='1.0' encoding='UTF-8'?>\n<!-- > --> <Parallels_disk_image>",
            "\u{feff}\r\n<Parallels_disk_image/>",
        ] {
            assert_eq!(with(0, descriptor.as_bytes()), Format::Parallels, "{descriptor}");
        }
        for other in [
            "<Parallels_disk_images>",
            "<?xml version='1.0'?><domain/>",
            "<?xml",
            "<!--",
        ] {
            assert_eq!(with(0, other.as_bytes()), Format::Raw, "{other}");
        }
        assert_eq!(with(0, b"conectix"), Format::Vhd);
        assert_eq!(with(0, b"LUKS\xba\xbe\0\x02"), Format::Luks);
        assert_eq!(of_content(&[0; 1024], b"conectix"), Format::Vhd);
        assert_eq!(of_content(&[], &[]), Format::Raw);
        assert_eq!(with(0, b"CD001"), Format::Raw);
    }
}
