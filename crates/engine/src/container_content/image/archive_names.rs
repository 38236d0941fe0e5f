//! Tells archives of images from archives of root folders by the names in them.

use std::collections::BTreeSet;

use super::super::root_path::components;

/// The names that were seen in an archive.
#[derive(Debug, Default)]
pub(in super::super) struct ArchiveNames {
    seen: BTreeSet<ImageName>,
}

#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
enum ImageName {
    Layout,
    Index,
    Manifest,
    Blob,
    /// A name that no image has.
    Other,
}

impl ArchiveNames {
    /// Takes the name of the next member.
    pub(in super::super) fn add(&mut self, path: &[u8]) {
        let parts = components(path).unwrap_or_default();
        let name = match &parts[..] {
            // The archive's own folder, and a list of old tags.
            [] | [b"repositories"] => return,
            [b"oci-layout"] => ImageName::Layout,
            [b"index.json"] => ImageName::Index,
            [b"manifest.json"] => ImageName::Manifest,
            [b"blobs", ..] => ImageName::Blob,
            [name, ..] if is_named_by_digest(name) => ImageName::Blob,
            _ => ImageName::Other,
        };
        self.seen.insert(name);
    }

    /// Whether a name was seen that no image has.
    pub(in super::super) fn has_other(&self) -> bool {
        self.seen.contains(&ImageName::Other)
    }

    /// Whether all members together are an image layout, or what `docker save` writes.
    pub(in super::super) fn is_of_image(&self) -> bool {
        let has = |name| self.seen.contains(&name);
        let is_layout = has(ImageName::Layout) && has(ImageName::Index);
        !self.has_other() && has(ImageName::Blob) && (is_layout || has(ImageName::Manifest))
    }
}

/// `HEX`, the folder of a layer; `HEX.json`, `HEX.tar`, `sha256:HEX`.
fn is_named_by_digest(name: &[u8]) -> bool {
    let name = name.strip_prefix(b"sha256:").unwrap_or(name);
    name.split_at_checked(64).is_some_and(|(hex, ending)| {
        hex.iter().all(u8::is_ascii_hexdigit) && (ending.is_empty() || ending.starts_with(b"."))
    })
}

#[cfg(test)]
mod tests {
    use super::ArchiveNames;

    fn is_image(names: &[&str]) -> bool {
        let mut seen = ArchiveNames::default();
        for name in names {
            seen.add(name.as_bytes());
        }
        seen.is_of_image()
    }

    #[test]
    fn images_and_root_folders_are_told_apart() {
        let hex = "0123456789abcdef".repeat(4);
        let (blob, folder) = (format!("blobs/sha256/{hex}"), format!("{hex}/"));
        let (layer, config, packed) = (
            format!("{hex}/layer.tar"),
            format!("{hex}.json"),
            format!("{hex}.tar.gz"),
        );
        let digest = format!("sha256:{hex}");
        assert!(is_image(&["./", "./blobs/", &blob, "./index.json", "./oci-layout"]));
        assert!(is_image(&[&folder, &layer, &config, "manifest.json", "repositories"]));
        assert!(is_image(&[&digest, &packed, "manifest.json"]));
        assert!(!is_image(&["oci-layout", &blob]));
        assert!(!is_image(&["manifest.json"]));
        assert!(!is_image(&["oci-layout", "index.json", &blob, "etc/"]));
        assert!(!is_image(&[&blob, "manifest.json", "srv/index.json"]));
        assert!(!is_image(&["./", "./bin", "./etc/", "./etc/hosts"]));
        assert!(!is_image(&[]));
    }
}
