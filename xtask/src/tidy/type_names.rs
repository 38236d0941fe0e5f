//! The name of a type is unique in its crate, so that a reader who finds it anywhere knows which one it is.

use std::collections::BTreeMap;

use super::Finding;
use super::rust_text::{RustFile, is_word};

/// Words before the name of a type.
const KEYWORDS: [&str; 4] = ["struct ", "enum ", "trait ", "union "];
/// The error of a crate is called by its path, and a subject with many errors has one of its own.
const EXEMPT: [&str; 1] = ["Error"];

pub(crate) fn check(sources: &[RustFile]) -> Vec<Finding> {
    let mut found: BTreeMap<(&str, &str), Vec<(&str, usize)>> = BTreeMap::new();
    for file in sources {
        let Some(name) = crate_of(&file.path) else { continue };
        for (line, declared) in declared_types(file) {
            found.entry((name, declared)).or_default().push((&file.path, line));
        }
    }
    let repeated = found.into_iter().filter(|(_, places)| places.len() > 1);
    let findings = repeated.flat_map(|((_, name), places)| {
        let (first, _) = places[0];
        let others = places[1..].to_vec();
        others.into_iter().map(move |(path, line)| {
            let advice = format!("{name} is also the name of a type in {first}: give each its own name");
            Finding::new(path, line, "type names", advice)
        })
    });
    findings.collect()
}

/// The crate of a file of production code.
fn crate_of(path: &str) -> Option<&str> {
    let (name, rest) = path.strip_prefix("crates/")?.split_once('/')?;
    // Code that creates hostile bytes for fuzzing is not part of any program.
    (rest.starts_with("src/") && !rest.contains("/hostile")).then_some(name)
}

/// The types that the production code of a file declares, with their lines.
fn declared_types(file: &RustFile) -> impl Iterator<Item = (usize, &str)> {
    (1..).zip(file.code.lines()).filter_map(|(number, line)| {
        let declaration = line.trim_start();
        let declaration = match declaration.strip_prefix("pub") {
            Some(rest) if rest.starts_with('(') => rest.split_once(')')?.1.trim_start(),
            Some(rest) => rest.trim_start(),
            None => declaration,
        };
        let rest = KEYWORDS.iter().find_map(|keyword| declaration.strip_prefix(keyword))?;
        let name = rest.split(|character| !is_word(character)).next()?;
        let is_meant = !name.is_empty() && !EXEMPT.contains(&name) && !file.is_test(number);
        is_meant.then_some((number, name))
    })
}

#[cfg(test)]
mod tests {
    use super::super::rust_text::{Purpose, RustFile};
    use super::check;

    fn findings(files: &[(&str, &str)]) -> Vec<(String, usize)> {
        let files: Vec<RustFile> = files
            .iter()
            .map(|(path, text)| RustFile::new(path, text, Purpose::Production))
            .collect();
        let found = check(&files).into_iter();
        found.map(|finding| (finding.path, finding.line)).collect()
    }

    #[test]
    fn a_name_that_two_types_of_a_crate_have_is_found() {
        let files = [
            ("crates/host/src/a.rs", "pub(crate) struct Shown<'a>(&'a str);\n"),
            ("crates/host/src/b.rs", "\nenum Shown {}\n"),
            ("crates/image/src/a.rs", "struct Shown;\n"),
        ];
        assert_eq!(findings(&files), [("crates/host/src/b.rs".to_owned(), 2)]);
    }

    #[test]
    fn tests_errors_and_fuzzing_may_repeat_a_name() {
        let tests = "#[cfg(test)]\nmod tests {\n    struct Shown;\n}\n";
        let files = [
            ("crates/host/src/a.rs", "struct Shown;\npub enum Error {}\n"),
            ("crates/host/src/b.rs", tests),
            ("crates/host/src/c.rs", "pub enum Error {}\n"),
            ("crates/host/src/hostile/d.rs", "struct Shown;\n"),
        ];
        assert_eq!(findings(&files), []);
    }
}
