//! Independent readers: dissect.hypervisor, libvhdi and libvmdk.
//!
//! `read.py` in this folder calls them, and works around their known defects.

#![expect(clippy::disallowed_methods, reason = "tests run the peers")]

use std::fs;
use std::path::Path;
use std::process::Command;

use holdfast_image::Format;

use super::{Lab, path_text};

const PYTHON: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../target/peers/bin/python");
const READ: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/images/peer/read.py");

/// A program that reads images.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reader {
    Dissect,
    Libvhdi,
    Libvmdk,
}

impl Reader {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Dissect => "dissect",
            Self::Libvhdi => "libvhdi",
            Self::Libvmdk => "libvmdk",
        }
    }

    /// The readers of this format.
    pub(crate) fn of(format: Format) -> &'static [Self] {
        match format {
            Format::Vhd | Format::Vhdx => &[Self::Dissect, Self::Libvhdi],
            Format::Vmdk => &[Self::Dissect, Self::Libvmdk],
            Format::Vdi | Format::Qcow2 | Format::Parallels => &[Self::Dissect],
            _ => &[],
        }
    }

    /// The disk of a chain of images, the top first; or the error of the reader.
    pub(crate) fn read(self, format: Format, chain: &[&Path], lab: &Lab) -> Result<Vec<u8>, String> {
        self.run(format, chain, lab, "all").map(|(_, bytes)| bytes)
    }

    /// The size of the disk, and its bytes from `offset` on.
    pub(crate) fn read_at(
        self,
        format: Format,
        image: &Path,
        lab: &Lab,
        offset: u64,
        length: usize,
    ) -> Result<(u64, Vec<u8>), String> {
        self.run(format, &[image], lab, &format!("{offset}:{length}"))
    }

    fn run(self, format: Format, chain: &[&Path], lab: &Lab, place: &str) -> Result<(u64, Vec<u8>), String> {
        let target = lab.path("read-by-peer");
        let output = Command::new(PYTHON)
            .args([READ, self.name(), format.name(), path_text(&target), place])
            .args(chain)
            .output()
            .unwrap_or_else(|error| panic!("these tests need {PYTHON}, which scripts/setup makes: {error}"));
        if !output.status.success() {
            return Err(String::from_utf8_lossy(&output.stderr).into_owned());
        }
        let size = String::from_utf8_lossy(&output.stdout);
        Ok((size.trim().parse().expect("a size"), fs::read(&target).unwrap()))
    }
}
