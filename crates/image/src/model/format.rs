//! The image formats, and the format that the extension of a file suggests.

#![deny(clippy::indexing_slicing)]
#![cfg_attr(not(test), deny(clippy::string_slice))]

use std::ffi::OsStr;
use std::path::Path;

use crate::{Error, Result};

/// A disk image format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Format {
    /// A raw disk. A file without a known magic number is treated as one.
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
    /// Linux Unified Key Setup: an encrypted disk.
    Luks,
}

impl Format {
    /// The formats that can be read and written. The others are only recognized, to be refused by name.
    pub const SUPPORTED: [Self; 7] = [
        Self::Raw,
        Self::Qcow2,
        Self::Vdi,
        Self::Vhd,
        Self::Vhdx,
        Self::Vmdk,
        Self::Parallels,
    ];

    /// The formats for new disks of machines on this host: hypervisors here read and write them well.
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

    /// Its name in QEMU, in overlays and on command lines.
    pub fn qemu_name(self) -> &'static str {
        match self {
            Self::Vhd => "vpc",
            other => other.name(),
        }
    }

    /// The format with that name. QEMU writes `host_device` and `file` for raw devices and files.
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

    /// The format of a new file, by its extension; raw if it has none or that of a raw disk.
    ///
    /// # Errors
    /// The extension is unknown: a mistyped one would otherwise create a raw disk.
    pub fn of_new_file(path: &Path) -> Result<Self> {
        match NameHint::of(path) {
            NameHint::Format(format) if Self::SUPPORTED.contains(&format) => Ok(format),
            NameHint::Raw | NameHint::Disk => Ok(Self::Raw),
            NameHint::Nothing if path.extension().is_none() => Ok(Self::Raw),
            NameHint::Nothing | NameHint::Format(_) => Err(Error::UnknownExtension { path: path.to_owned() }),
        }
    }

    /// Fails for formats that are recognized but not supported.
    pub(crate) fn require_supported(self, image: &str) -> Result<()> {
        if Self::SUPPORTED.contains(&self) {
            return Ok(());
        }
        let detail = match self {
            Self::Luks => "open it with cryptsetup first, or set the format to raw to use the encrypted bytes",
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

/// Bytes at the start of a file that [`of_content`] needs.
pub(crate) const HEAD_BYTES: u64 = 1024;
/// The format that the extension of a file suggests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NameHint {
    /// An image of this format.
    Format(Format),
    /// A raw disk.
    Raw,
    /// A disk: usually raw, but images of other formats have such names, too.
    Disk,
    Nothing,
}

impl NameHint {
    pub(crate) fn of(path: &Path) -> Self {
        let extension = path.extension().and_then(OsStr::to_str).map(str::to_ascii_lowercase);
        match extension.as_deref() {
            Some("raw" | "dd" | "bin" | "iso") => Self::Raw,
            Some("img" | "ima" | "disk") => Self::Disk,
            Some("avhd") => Self::Format(Format::Vhd),
            Some("avhdx") => Self::Format(Format::Vhdx),
            // `DiskDescriptor.xml` of a Parallels disk.
            Some("xml") => Self::Format(Format::Parallels),
            Some("file" | "host_device") | None => Self::Nothing,
            Some(other) => Format::from_name(other).map_or(Self::Nothing, Self::Format),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Format;

    #[test]
    fn format_of_new_file_by_extension() {
        let of = |name: &str| Format::of_new_file(std::path::Path::new(name)).ok();
        for (name, format) in [
            ("web.qcow2", Format::Qcow2),
            ("web.VHDX", Format::Vhdx),
            ("web.img", Format::Raw),
            ("web.raw", Format::Raw),
            ("web", Format::Raw),
            ("web.hdd", Format::Parallels),
        ] {
            assert_eq!(of(name), Some(format), "{name}");
        }
        for name in ["web.vmkd", "web.foo", "web.qed", "web.luks", "web.2026-01-01"] {
            assert_eq!(of(name), None, "{name}");
        }
    }

    #[test]
    fn format_names_match_qemu() {
        for format in [Format::Raw, Format::Qcow2, Format::Vhd, Format::Vdi, Format::Luks] {
            assert_eq!(Format::from_name(format.name()), Some(format));
            assert_eq!(Format::from_name(format.qemu_name()), Some(format));
        }
        assert_eq!(Format::from_name("nbd"), None);
    }
}
