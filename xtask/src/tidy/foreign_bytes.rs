//! Modules that parse numbers from bytes must not index: the content of a file must not be able to crash the program.
//!
//! Clippy refuses `a[i]` in a module that denies `indexing_slicing`. This rule finds the modules that must deny it, by
//! the calls with which they read numbers.

use std::collections::BTreeSet;

use super::Finding;
use super::rust_text::RustFile;

/// The crates that the rule applies to, as path prefixes.
const CRATES: [&str; 6] = [
    "crates/appliance/src/",
    "crates/archive/src/",
    "crates/block/src/",
    "crates/guest-files/src/",
    "crates/image/src/",
    "crates/transfer/src/",
];
/// Calls and types that read a number from bytes.
const READS: [&str; 4] = ["from_le_bytes", "from_be_bytes", "Record::", "Record<"];
const DENIAL: &str = "#![deny(clippy::indexing_slicing";

/// Files that read numbers and may index, each with the reason why no number from a file is used as an index. An
/// exception that is not needed any more is reported as a finding.
pub(crate) const EXCEPTIONS: &[(&str, &str)] = &[];

pub(crate) fn check(sources: &[RustFile], exceptions: &[(&str, &str)]) -> Vec<Finding> {
    let denying: BTreeSet<&str> = sources
        .iter()
        .filter(|file| file.code.contains(DENIAL))
        .map(|file| file.path.as_str())
        .collect();
    let mut findings = Vec::new();
    let mut used = BTreeSet::new();
    for file in sources {
        // Code that creates hostile bytes for fuzzing is not part of any program.
        let is_meant = CRATES.iter().any(|path| file.path.starts_with(path)) && !file.path.contains("/hostile");
        let Some(line) = first_read(file).filter(|_| is_meant && !is_covered(&file.path, &denying)) else {
            continue;
        };
        if exceptions.iter().any(|(path, _)| *path == file.path) {
            used.insert(file.path.as_str());
        } else {
            let advice = format!("it reads numbers out of bytes: put {DENIAL})] before its first item");
            findings.push(Finding::new(&file.path, line, "foreign bytes", advice));
        }
    }
    for (path, reason) in exceptions.iter().filter(|(path, _)| !used.contains(path)) {
        let advice = format!("{path} needs no exception ({reason}): take it out of EXCEPTIONS");
        findings.push(Finding::new(
            "xtask/src/tidy/foreign_bytes.rs",
            0,
            "foreign bytes",
            advice,
        ));
    }
    findings
}

/// The line of the first number that is read, except in tests.
fn first_read(file: &RustFile) -> Option<usize> {
    let offsets = READS.iter().flat_map(|text| file.code.match_indices(text));
    let lines = offsets.map(|(offset, _)| file.line_of(offset));
    lines.filter(|line| !file.is_test(*line)).min()
}

/// Whether a file, or a module that contains it, denies indexing.
fn is_covered(path: &str, denying: &BTreeSet<&str>) -> bool {
    let mut folder = path.strip_suffix(".rs").unwrap_or(path);
    let mut is_denied = denying.contains(path);
    while let Some((parent, _)) = folder.rsplit_once('/') {
        is_denied |= denying.contains(format!("{parent}/mod.rs").as_str());
        is_denied |= denying.contains(format!("{parent}.rs").as_str());
        folder = parent;
    }
    is_denied
}

#[cfg(test)]
mod tests {
    use super::super::rust_text::{Purpose, RustFile};
    use super::{DENIAL, EXCEPTIONS, check};

    const READ: &str = "fn f(a: [u8; 2]) -> u16 {\n    u16::from_le_bytes(a)\n}\n";

    fn paths(files: &[(&str, &str)], exceptions: &[(&str, &str)]) -> Vec<String> {
        let files: Vec<RustFile> = files
            .iter()
            .map(|(path, text)| RustFile::new(path, text, Purpose::Production))
            .collect();
        check(&files, exceptions)
            .into_iter()
            .map(|finding| finding.path)
            .collect()
    }

    #[test]
    fn modules_that_read_numbers_must_deny_indexing_or_inherit_it() {
        let denial = format!("{DENIAL})]\n");
        let own = format!("{denial}{READ}");
        let path = "crates/image/src/vdi/header.rs";
        assert_eq!(paths(&[(path, READ)], &[]), [path]);
        assert!(paths(&[(path, &own)], &[]).is_empty());
        for parent in [
            "crates/image/src/vdi/mod.rs",
            "crates/image/src/vdi.rs",
            "crates/image/src/mod.rs",
        ] {
            assert!(paths(&[(path, READ), (parent, &denial)], &[]).is_empty(), "{parent}");
        }
        assert_eq!(
            paths(&[(path, READ), ("crates/image/src/vhd/mod.rs", &denial)], &[]),
            [path]
        );
        // The rule does not apply to other crates, and tests may index.
        let test = format!("#[cfg(test)]\nmod tests {{\n{READ}}}\n");
        assert!(paths(&[("crates/cli/src/a.rs", READ), (path, &test)], &[]).is_empty());
    }

    #[test]
    fn an_exception_is_used_and_has_a_reason() {
        let path = "crates/block/src/a.rs";
        assert!(paths(&[(path, READ)], &[(path, "why")]).is_empty());
        assert_eq!(
            paths(&[(path, "")], &[(path, "why")]),
            ["xtask/src/tidy/foreign_bytes.rs"]
        );
        assert!(EXCEPTIONS.iter().all(|(_, reason)| !reason.is_empty()));
    }
}
