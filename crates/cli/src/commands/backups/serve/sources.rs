//! What to serve, and how writes are treated: arguments that several verbs share.

use std::path::{Path, PathBuf};

use holdfast_engine::{
    AddedExport, AddedExports, AddedWrites, ClientWrites, ServeSource, ServedImage, SourceChoice, SourceName,
};
use holdfast_engine::{DiskOrigin, ServingError, SnapshotName};
use holdfast_image::{Format, OpenOptions};

use crate::args::parse_format;
use crate::errors::Error;

/// Default folder for data that clients write; it must be on a disk.
pub(super) const OVERLAY_DEFAULT: &str = "/var/tmp";

/// How writes are treated, and how images are opened.
#[derive(Debug, clap::Args)]
pub(super) struct SourceArgs {
    /// Allow writes: they change an image, which is locked; for a snapshot, they are discarded at the end
    #[arg(long, conflicts_with = "discard")]
    writable: bool,
    /// Allow writes, and discard them at the end
    #[arg(long, conflicts_with = "overlay")]
    discard: bool,
    /// Allow writes, and keep them in files in this folder, for the next time
    #[arg(long, value_name = "FOLDER")]
    overlay: Option<PathBuf>,
    /// Machine that the images belong to: their exports are MACHINE/DISK, and LUNs of one target
    #[arg(short, long, value_name = "NAME")]
    machine: Option<String>,
    /// Format of the images (raw, qcow2, vdi, vhd, vhdx, vmdk, parallels) [default: detected]
    #[arg(long, value_name = "FORMAT", value_parser = parse_format)]
    format: Option<Format>,
    /// Allow images to refer to this file, or to files in this folder; may be repeated
    #[arg(long, value_name = "PATH")]
    allow: Vec<PathBuf>,
}

/// Whether a word is an image: it has a `/`, is NAME=IMAGE, or has the extension of an image format.
fn is_image(word: &str) -> bool {
    word.contains(['/', '=']) || SourceName::is_called_like_an_image(word.as_ref())
}

/// An existing file or folder, as a running server finds it.
fn absolute(path: &Path) -> Result<PathBuf, Error> {
    std::path::absolute(path).map_err(|source| Error::File {
        action: "look at",
        path: path.to_owned(),
        source,
    })
}

impl SourceArgs {
    /// The exports that this command serves itself.
    pub(super) fn choice(&self, words: &[String]) -> Result<SourceChoice, Error> {
        let sources = words.iter().map(|word| self.source(word));
        Ok(SourceChoice {
            sources: sources.collect::<Result<_, Error>>()?,
            writes: match (&self.overlay, self.writable, self.discard) {
                (Some(folder), _, _) => ClientWrites::Keep(folder.clone()),
                (None, true, _) => ClientWrites::InPlace(OVERLAY_DEFAULT.into()),
                (None, false, true) => ClientWrites::ThrowAway(OVERLAY_DEFAULT.into()),
                (None, false, false) => ClientWrites::Refuse,
            },
            machine: self.machine.clone(),
        })
    }

    fn source(&self, word: &str) -> Result<ServeSource, Error> {
        if !is_image(word) {
            return Ok(ServeSource::Snapshot(word.parse()?));
        }
        let options = OpenOptions {
            format: self.format,
            allow: self.allow.clone(),
            ..OpenOptions::default()
        };
        let source = SourceName::parse(word.as_ref())?;
        Ok(ServeSource::Image(Box::new(ServedImage { source, options })))
    }

    /// The same exports for a running server, whose current folder is another one.
    pub(super) fn request(&self, words: &[String]) -> Result<AddedExports, Error> {
        let exports = words.iter().map(|word| self.added(word));
        Ok(AddedExports {
            exports: exports.collect::<Result<_, Error>>()?,
            writes: match (&self.overlay, self.writable, self.discard) {
                (Some(folder), _, _) => AddedWrites::Keep(absolute(folder)?),
                (None, true, _) => AddedWrites::InPlace,
                (None, false, true) => AddedWrites::Discard,
                (None, false, false) => AddedWrites::Refuse,
            },
            machine: self.machine.clone(),
        })
    }

    fn added(&self, word: &str) -> Result<AddedExport, Error> {
        if !is_image(word) {
            // An invalid name is refused here, with advice.
            word.parse::<SnapshotName>()?;
            return Ok(AddedExport::Snapshot { name: word.to_owned() });
        }
        let source = SourceName::parse(word.as_ref())?;
        let DiskOrigin::Path(path) = source.origin else {
            return Err(holdfast_engine::Error::from(ServingError::StandardInput).into());
        };
        let allow = self.allow.iter().map(|path| absolute(path));
        Ok(AddedExport::Image {
            path: absolute(&path)?,
            name: source.disk.map(|disk| disk.to_string()),
            format: self.format.map(|format| format.name().to_owned()),
            allow: allow.collect::<Result<_, Error>>()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::is_image;

    #[test]
    fn images_are_recognized_by_their_names() {
        for word in ["./web1", "/vm/web1", "web1.qcow2", "vda=web1.raw", "disk.VMDK"] {
            assert!(is_image(word), "{word}");
        }
        for word in ["web1", "web1:vda", "web1@latest", "web1.example.org", "3fa2c1"] {
            assert!(!is_image(word), "{word}");
        }
    }
}
