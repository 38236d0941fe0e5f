//! Windows paths in images.

#![deny(clippy::indexing_slicing)]
#![cfg_attr(not(test), deny(clippy::string_slice))]

/// Converts to a path of this system. Of an absolute path with a drive, volume or host only the file name remains,
/// relative to the image: the rest does not exist here.
pub(crate) fn from_windows(path: &str) -> String {
    let path = path.replace('\\', "/");
    let is_elsewhere = path.starts_with("//") || path.as_bytes().get(1) == Some(&b':');
    if is_elsewhere {
        return path.rsplit('/').next().unwrap_or_default().to_owned();
    }
    path.strip_prefix("./").unwrap_or(&path).to_owned()
}

/// Converts to a Windows path; a relative one gets the prefix `.\`.
pub(crate) fn to_windows(path: &str) -> String {
    let path = path.replace('/', "\\");
    if path.starts_with('\\') {
        path
    } else {
        format!(".\\{path}")
    }
}

#[cfg(test)]
mod tests {
    use super::{from_windows, to_windows};

    #[test]
    fn paths_round_trip() {
        for path in ["base.vhdx", "../web1/base.vhdx", "/srv/base.vhdx"] {
            assert_eq!(from_windows(&to_windows(path)), path);
        }
        for elsewhere in [
            r"C:\VMs\base.vhdx",
            r"\\server\share\base.vhdx",
            r"\\?\Volume{1}\base.vhdx",
        ] {
            assert_eq!(from_windows(elsewhere), "base.vhdx");
        }
    }
}
