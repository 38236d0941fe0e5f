//! XML must be built, not written as text: an unescaped value could become an element of a machine's configuration.
//!
//! Only `holdfast_hardware::xml` may have the ends of tags in its strings.

use super::Finding;
use super::rust_text::RustFile;

/// Every element ends with one of these.
const ENDS: [&str; 2] = ["<\u{2f}", "\u{2f}>"];
/// Folders whose strings may contain tags: the XML writer; a descriptor with only numbers and identities in a lower
/// crate; and test servers, which share no code with the code under test.
const EXEMPT: [&str; 3] = [
    "crates/hardware/src/xml/",
    "crates/image/src/formats/ploop/descriptor/",
    "rigs/",
];
const ADVICE: &str = "XML in a string: build an `Element` of `holdfast_hardware::xml`, which escapes its values";

pub(crate) fn check(sources: &[RustFile]) -> Vec<Finding> {
    // Code that creates hostile configurations for fuzzing is not part of any program.
    let is_exempt = |path: &str| EXEMPT.iter().any(|folder| path.starts_with(folder)) || path.contains("/hostile");
    let is_meant = |file: &&RustFile| !is_exempt(&file.path);
    let mut findings = Vec::new();
    for file in sources.iter().filter(is_meant) {
        let mut lines: Vec<usize> = file
            .strings
            .iter()
            .flat_map(|(start, literal)| {
                let ends = ENDS.iter().flat_map(|end| literal.match_indices(end));
                ends.map(move |(offset, _)| file.line_of(start + offset))
            })
            .filter(|line| !file.is_test(*line))
            .collect();
        lines.sort_unstable();
        lines.dedup();
        findings.extend(
            lines
                .into_iter()
                .map(|line| Finding::new(&file.path, line, "markup", ADVICE)),
        );
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::super::rust_text::{Purpose, RustFile};
    use super::check;

    fn lines(path: &str, text: &str) -> Vec<usize> {
        let file = RustFile::new(path, text, Purpose::Production);
        check(&[file]).into_iter().map(|finding| finding.line).collect()
    }

    #[test]
    fn tags_in_strings_are_found_in_every_form() {
        for literal in [
            "\"<a>{}</a>\"",
            "\"<a b='{}'/>\"",
            "r#\"<a b=\"x\"/>\"#",
            "b\"</a>\"",
            "\"a\\\"</b>\"",
        ] {
            let text = format!("fn f() {{\n    g({literal})\n}}\n");
            assert_eq!(lines("crates/host/src/a.rs", &text), [2], "{literal}");
        }
        let long = "const A: &str = \"<a>\n  <b/>\n</a>\";\n";
        assert_eq!(lines("crates/host/src/a.rs", long), [2, 3]);
    }

    #[test]
    fn tests_comments_and_the_writer_itself_may_have_them() {
        let tests = "#[cfg(test)]\nmod tests {\n    const A: &str = \"<a/>\";\n}\n";
        assert_eq!(lines("crates/host/src/a.rs", tests), [] as [usize; 0]);
        assert_eq!(
            lines(
                "crates/host/src/a.rs",
                "// \"<a/>\"\nfn f() { g(\"the <os> of a/b > c\") }\n"
            ),
            [] as [usize; 0]
        );
        let written = "const A: &str = \"</\";\n";
        assert_eq!(lines("crates/hardware/src/xml/element.rs", written), [] as [usize; 0]);
        assert_eq!(lines("rigs/xapi-server/src/http.rs", written), [] as [usize; 0]);
        assert_eq!(lines("crates/hardware/src/hostile.rs", written), [] as [usize; 0]);
        assert_eq!(lines("crates/hardware/src/a.rs", written), [1]);
    }
}
