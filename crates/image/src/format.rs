//! Which format a file has, by its content.

use holdfast_block::to_usize;

use crate::file::ImageFile;
use crate::ploop::descriptor::is_descriptor;
use crate::{Error, Result};

/// A disk image format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Format {
    /// The bytes of the disk as they are; also what every file without a known magic number is.
    Raw,
    /// QEMU copy-on-write, version 2 or 3.
    Qcow2,
    /// QEMU copy-on-write, version 1.
    Qcow,
    /// QEMU enhanced disk.
    Qed,
    /// VirtualBox.
    Vdi,
    /// Virtual PC and XenServer.
    Vhd,
    /// Hyper-V.
    Vhdx,
    /// VMware.
    Vmdk,
    /// Parallels and ploop: one delta, or the descriptor of a disk of several.
    Parallels,
    /// Linux unified key setup: an encrypted disk.
    Luks,
}

impl Format {
    /// The formats that can be read and written; the others are known by name, so that they can be refused by it.
    pub const SUPPORTED: [Self; 7] = [
        Self::Raw,
        Self::Qcow2,
        Self::Vdi,
        Self::Vhd,
        Self::Vhdx,
        Self::Vmdk,
        Self::Parallels,
    ];

    /// Those of them in which new disks of machines are made: what runs machines here reads and writes them well.
    pub const RUN: [Self; 2] = [Self::Raw, Self::Qcow2];

    /// The name. QEMU calls a VHD `vpc`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Qcow2 => "qcow2",
            Self::Qcow => "qcow",
            Self::Qed => "qed",
            Self::Vdi => "vdi",
            Self::Vhd => "vhd",
            Self::Vhdx => "vhdx",
            Self::Vmdk => "vmdk",
            Self::Parallels => "parallels",
            Self::Luks => "luks",
        }
    }

    /// The name that QEMU has for it, in overlays and on command lines.
    pub fn qemu_name(self) -> &'static str {
        match self {
            Self::Vhd => "vpc",
            other => other.name(),
        }
    }

    /// The format of that name; `host_device` and `file`, which QEMU writes for plain devices and files, are raw.
    pub fn from_name(name: &str) -> Option<Self> {
        Some(match name {
            "raw" | "file" | "host_device" => Self::Raw,
            "qcow2" => Self::Qcow2,
            "qcow" => Self::Qcow,
            "qed" => Self::Qed,
            "vdi" => Self::Vdi,
            "vpc" | "vhd" => Self::Vhd,
            "vhdx" => Self::Vhdx,
            "vmdk" => Self::Vmdk,
            "parallels" | "ploop" | "hdd" | "hds" => Self::Parallels,
            "luks" => Self::Luks,
            _ => return None,
        })
    }

    /// Refuses the formats that have a name but no reader.
    pub(crate) fn require_supported(self, image: &str) -> Result<()> {
        if Self::SUPPORTED.contains(&self) {
            return Ok(());
        }
        let detail = match self {
            Self::Luks => {
                "encrypted disks are opened by the host: use cryptsetup, or name the format raw for the bytes"
            }
            _ => "convert it to qcow2 or raw first",
        };
        Err(Error::UnsupportedFormat {
            image: image.to_owned(),
            format: self.name(),
            detail,
        })
    }
}

impl std::fmt::Display for Format {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(self.name())
    }
}

/// Bytes from the start of a file that [`of_content`] wants.
pub(crate) const HEAD_BYTES: u64 = 1024;
/// Bytes from the end of a file that [`of_content`] wants.
pub(crate) const TAIL_BYTES: u64 = 512;

/// The format of a file that starts with `head` and ends with `tail`.
///
/// A disk whose guest wrote a magic number into its first sector looks like an image of that format: a caller that knows
/// the format says so instead of asking. A VHD of fixed size has its mark at the end only.
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

fn is_vmdk_text(head: &[u8]) -> bool {
    let start = head
        .iter()
        .position(|byte| !byte.is_ascii_whitespace())
        .unwrap_or(head.len());
    head[start..].starts_with(b"# Disk DescriptorFile")
}

pub(crate) fn of_file(file: &dyn ImageFile) -> Result<Format> {
    let length_bytes = file.length_bytes()?;
    let mut head = vec![0; to_usize(HEAD_BYTES.min(length_bytes))];
    file.read_at(&mut head, 0)?;
    // Old versions of Virtual PC wrote a footer of 511 bytes behind whole sectors.
    let tail_bytes = if length_bytes % TAIL_BYTES == TAIL_BYTES - 1 {
        TAIL_BYTES - 1
    } else {
        TAIL_BYTES.min(length_bytes)
    };
    let mut tail = vec![0; to_usize(tail_bytes)];
    file.read_at(&mut tail, length_bytes - tail_bytes)?;
    Ok(of_content(&head, &tail))
}

#[cfg(test)]
mod tests {
    use super::{Format, of_content};

    #[test]
    fn every_magic_number_is_known_and_everything_else_is_raw() {
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
        assert_eq!(with(0, b"# Disk DescriptorFile\n"), Format::Vmdk);
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

    #[test]
    fn names_are_ours_and_those_of_qemu() {
        for format in [Format::Raw, Format::Qcow2, Format::Vhd, Format::Vdi, Format::Luks] {
            assert_eq!(Format::from_name(format.name()), Some(format));
            assert_eq!(Format::from_name(format.qemu_name()), Some(format));
        }
        assert_eq!(Format::from_name("nbd"), None);
    }
}
