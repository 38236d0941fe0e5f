//! Every source file belongs to a crate, every crate has content, and names of files are meaningful.

use std::collections::{BTreeMap, BTreeSet};

use super::rust_text::{Purpose, RustFile, is_word, word_offsets};
use super::{Finding, Tree};

/// Folders of the repository that contain a crate: `crates/NAME`, `rigs/NAME` and `xtask`.
pub(crate) fn crate_folders(tree: &Tree) -> BTreeSet<String> {
    tree.iter()
        .filter_map(|(path, _)| path.strip_suffix("/Cargo.toml"))
        .filter(|folder| folder.starts_with("crates/") || folder.starts_with("rigs/") || *folder == "xtask")
        .map(str::to_owned)
        .collect()
}

/// All Rust files of the repository, each with its purpose.
pub(crate) fn sources(tree: &Tree) -> Vec<RustFile> {
    let mut purposes = BTreeMap::new();
    for folder in crate_folders(tree) {
        for root in roots(tree, &folder) {
            reach(tree, &root, Purpose::Production, &mut purposes);
        }
    }
    tree.iter()
        .filter(|(path, _)| is_rust(path))
        .map(|(path, text)| {
            let known = purposes.get(path).copied().unwrap_or(Purpose::Production);
            let purpose = if is_test_path(path) { Purpose::Test } else { known };
            RustFile::new(path, text, purpose)
        })
        .collect()
}

pub(crate) fn check(tree: &Tree, sources: &[RustFile]) -> Vec<Finding> {
    const EMPTY_NAMES: [&str; 6] = ["utils.rs", "util.rs", "misc.rs", "helpers.rs", "common.rs", "tools.rs"];
    let mut findings = Vec::new();
    for folder in crate_folders(tree) {
        let source_folder = format!("{folder}/src/");
        let files = || sources.iter().filter(|file| file.path.starts_with(&source_folder));
        if !files().any(has_content) {
            let advice = "this crate has no content: add it with its first real part, not before";
            findings.push(Finding::new(&format!("{folder}/Cargo.toml"), 0, "empty-crate", advice));
        }
        let mut reached = BTreeMap::new();
        for root in roots(tree, &folder) {
            reach(tree, &root, Purpose::Production, &mut reached);
        }
        for file in files().filter(|file| !reached.contains_key(&file.path)) {
            let advice = "no `mod` leads to this file, so it is never compiled: declare it or delete it";
            findings.push(Finding::new(&file.path, 0, "dead-file", advice));
        }
        for file in files() {
            let name = file.path.rsplit('/').next().unwrap_or_default();
            if EMPTY_NAMES.contains(&name) {
                let advice = "this name says nothing: name the concept, or put each piece next to its one user";
                findings.push(Finding::new(&file.path, 0, "file-name", advice));
            }
        }
    }
    findings
}

/// Whether the file has more than `fn main() {}`: an empty root is not content.
fn has_content(file: &RustFile) -> bool {
    let code: String = file.code.split_whitespace().collect();
    !code.replace("fnmain(){}", "").is_empty()
}

/// Whether a file is not part of the code that users run: tests, test suites of traits (`conformance.rs`), build
/// scripts.
fn is_test_path(path: &str) -> bool {
    path.split('/').any(|part| {
        matches!(
            part,
            "tests"
                | "test-kit"
                | "sanoid-runner"
                | "benches"
                | "examples"
                | "fuzz"
                | "bench"
                | "conformance.rs"
                | "conformance"
                | "build.rs"
        )
    })
}

fn is_rust(path: &str) -> bool {
    path.rsplit_once('.').is_some_and(|(_, extension)| extension == "rs")
}

/// The root files below `src` that cargo compiles.
fn roots(tree: &Tree, folder: &str) -> Vec<String> {
    let binaries = format!("{folder}/src/bin/");
    let is_binary = |path: &str| path.starts_with(&binaries) && is_rust(path) && !path[binaries.len()..].contains('/');
    ["lib.rs", "main.rs"]
        .iter()
        .map(|name| format!("{folder}/src/{name}"))
        .filter(|path| tree.get(path).is_some())
        .chain(
            tree.iter()
                .map(|(path, _)| path.to_owned())
                .filter(|path| is_binary(path)),
        )
        .collect()
}

/// Follows the `mod name;` items of the file at `path`. A file that is reached in several ways counts as production if
/// one of them is.
fn reach(tree: &Tree, path: &str, purpose: Purpose, purposes: &mut BTreeMap<String, Purpose>) {
    let Some(text) = tree.get(path) else { return };
    match purposes.get(path) {
        Some(known) if *known == purpose || *known == Purpose::Production => return,
        _ => purposes.insert(path.to_owned(), purpose),
    };
    let file = RustFile::new(path, text, purpose);
    let folder = module_folder(path);
    for offset in word_offsets(&file.code, "mod") {
        let rest = file.code[offset + 3..].trim_start();
        let name_length = rest.find(|c: char| !is_word(c)).unwrap_or(rest.len());
        let (name, rest) = rest.split_at(name_length);
        if name.is_empty() || !rest.trim_start().starts_with(';') {
            continue;
        }
        let below = if file.is_test(file.line_of(offset)) {
            Purpose::Test
        } else {
            Purpose::Production
        };
        for candidate in [format!("{folder}/{name}.rs"), format!("{folder}/{name}/mod.rs")] {
            reach(tree, &candidate, below, purposes);
        }
    }
}

/// The folder of the modules that the file at `path` declares.
fn module_folder(path: &str) -> &str {
    let (folder, name) = path.rsplit_once('/').unwrap_or(("", path));
    match name {
        "lib.rs" | "main.rs" | "mod.rs" => folder,
        _ if folder.ends_with("src/bin") => folder,
        _ => path.strip_suffix(".rs").unwrap_or(path),
    }
}

#[cfg(test)]
mod tests {
    use super::{Tree, check, sources};

    fn findings(files: &[(&str, &str)]) -> Vec<String> {
        let tree = Tree::of(files);
        check(&tree, &sources(&tree))
            .into_iter()
            .map(|finding| format!("{} {}", finding.path, finding.rule))
            .collect()
    }

    #[test]
    fn a_file_that_no_mod_leads_to_is_dead() {
        let files = [
            ("crates/a/Cargo.toml", ""),
            ("crates/a/src/lib.rs", "mod x;\n// mod commented;\n"),
            ("crates/a/src/x.rs", "mod y;\npub(crate) mod z;"),
            ("crates/a/src/x/y.rs", ""),
            ("crates/a/src/x/z/mod.rs", ""),
            ("crates/a/src/commented.rs", ""),
            ("crates/a/src/bin/tool.rs", "fn main() { real() }"),
        ];
        assert_eq!(findings(&files), ["crates/a/src/commented.rs dead-file"]);
    }

    #[test]
    fn a_crate_without_content_and_a_name_without_meaning_are_found() {
        let empty = [
            ("crates/a/Cargo.toml", ""),
            ("crates/a/src/main.rs", "//! Doc.\n\nfn main() {}\n"),
        ];
        assert_eq!(findings(&empty), ["crates/a/Cargo.toml empty-crate"]);
        let named = [
            ("crates/a/Cargo.toml", ""),
            ("crates/a/src/lib.rs", "mod utils;"),
            ("crates/a/src/utils.rs", "fn f() {}"),
        ];
        assert_eq!(findings(&named), ["crates/a/src/utils.rs file-name"]);
    }

    #[test]
    fn a_module_declared_for_tests_is_a_test() {
        let tree = Tree::of(&[
            ("crates/a/Cargo.toml", ""),
            ("crates/a/src/lib.rs", "mod real;\n#[cfg(test)]\nmod simulation;\n"),
            ("crates/a/src/real.rs", "fn f() {}\n"),
            ("crates/a/src/simulation.rs", "mod step;\n"),
            ("crates/a/src/simulation/step.rs", "fn f() {}\n"),
            ("crates/a/tests/end.rs", "fn f() {}\n"),
            ("crates/a/src/real/conformance.rs", "fn f() {}\n"),
            ("crates/a/build.rs", "fn main() {}\n"),
        ]);
        let tests: Vec<_> = sources(&tree)
            .into_iter()
            .filter(|file| file.is_test(1))
            .map(|file| file.path)
            .collect();
        assert_eq!(
            tests,
            [
                "crates/a/build.rs",
                "crates/a/src/real/conformance.rs",
                "crates/a/src/simulation.rs",
                "crates/a/src/simulation/step.rs",
                "crates/a/tests/end.rs"
            ]
        );
    }
}
