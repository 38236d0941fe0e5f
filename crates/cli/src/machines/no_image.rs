//! Files that contain machines, not images: their bytes would be backed up as a disk that no machine can read.

use std::ffi::OsStr;
use std::path::Path;

use holdfast_engine::SourceName;

use crate::errors::{Error, Kind};

/// Returns an error if a file's name or content is not that of an image.
pub(crate) fn refuse(word: &OsStr) -> Result<(), Error> {
    let name = word.to_string_lossy().to_lowercase();
    let path = word.display();
    let packings = ["", ".gz", ".zst", ".zstd", ".lzo"];
    let is_called = |ending: &str| {
        packings
            .iter()
            .any(|packing| name.ends_with(&format!(".{ending}{packing}")))
    };
    if name.rsplit_once('.').is_some_and(|(_, ending)| ending == "vbox") {
        return Err(Error::usage(
            format!("{path} has the settings of a VirtualBox machine, and is not an image"),
            format!("vbox:{path} means that machine"),
        ));
    }
    if is_bare_folder(word) {
        return Err(Error::refused(
            Kind::Refused,
            format!("{path} is a folder, and no image"),
            format!("libvirt:{path} means the machine of that name"),
        ));
    }
    if ["ova", "ovf", "xva", "vma"].iter().any(|ending| is_called(ending)) {
        return Err(Error::usage(
            format!("{path} has the name of a machine archive, and is not an image"),
            "holdfast import takes archives in; if it has the bytes of a disk, rename it",
        ));
    }
    Ok(())
}

/// A folder in the current folder whose name may be that of a machine. Parallels disks are folders too, but have the
/// extension of an image or a descriptor.
fn is_bare_folder(word: &OsStr) -> bool {
    let path = Path::new(word);
    path.file_name() == Some(word)
        && path.is_dir()
        && !SourceName::is_called_like_an_image(word)
        && !path.join("DiskDescriptor.xml").exists()
}
