//! Files that hold machines, and are no images: their bytes would be taken for those of a disk that no machine could read.

use std::ffi::OsStr;

use crate::errors::Error;

/// Refuses what is called like something else.
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
            format!("{path} has the settings of a machine of VirtualBox, and is no image"),
            format!("vbox:{path} means that machine"),
        ));
    }
    if ["ova", "ovf", "xva", "vma"].iter().any(|ending| is_called(ending)) {
        return Err(Error::usage(
            format!("{path} is called like an archive of a machine, and is no image"),
            "holdfast import takes archives in; where it is the bytes of a disk, give it another name",
        ));
    }
    Ok(())
}
