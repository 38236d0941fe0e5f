//! Normalizes paths of files in a package.

use std::borrow::Cow;

/// The path without `.`, `..` and empty components; `None` if it is absolute, leaves the folder, or names no file.
///
/// Links are not resolved: members of an archive are not links.
pub fn plain_path(path: &str) -> Option<Cow<'_, str>> {
    let is_detour = |part: &str| matches!(part, "" | "." | "..");
    if !path.split('/').any(is_detour) {
        return Some(Cow::Borrowed(path));
    }
    if path.starts_with('/') || path.rsplit('/').next().is_none_or(is_detour) {
        return None;
    }
    let mut parts = Vec::new();
    for part in path.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()?),
            part => parts.push(part),
        }
    }
    Some(Cow::Owned(parts.join("/")))
}

#[cfg(test)]
mod tests {
    use super::plain_path;

    #[test]
    fn paths_are_normalized() {
        for (path, expected) in [
            ("d.vmdk", Some("d.vmdk")),
            ("./d.vmdk", Some("d.vmdk")),
            ("././/d.vmdk", Some("d.vmdk")),
            ("a/./b//d.vmdk", Some("a/b/d.vmdk")),
            ("a/../d.vmdk", Some("d.vmdk")),
            ("a/b/../../d.vmdk", Some("d.vmdk")),
            ("...", Some("...")),
            ("a/.../d", Some("a/.../d")),
            ("", None),
            (".", None),
            ("a/", None),
            ("a/..", None),
            ("/d.vmdk", None),
            ("../d.vmdk", None),
            ("a/../../d.vmdk", None),
            ("./../d.vmdk", None),
        ] {
            assert_eq!(plain_path(path).as_deref(), expected, "{path:?}");
        }
    }
}
