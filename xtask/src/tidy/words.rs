//! Finds directories that exist only on the machine on which a change was written.

use super::{Finding, Tree};

/// Absolute paths that exist on one machine only. They are concatenated here so that this file does not violate the
/// rule.
const PATHS: [&str; 2] = [concat!("/wo", "rk/"), concat!("/var/", "tmp/")];

pub(crate) fn check(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (path, text) in tree.iter() {
        for (index, line) in text.lines().enumerate() {
            for word in PATHS {
                let stands = line.match_indices(word).any(|(offset, _)| is_absolute(&line[..offset]));
                if stands {
                    let advice = format!("{word} is a place on one machine: take it as a parameter, or use TMPDIR");
                    findings.push(Finding::new(path, index + 1, "words", advice));
                }
            }
        }
    }
    findings
}

/// Whether a `/` after `before` begins an absolute path.
fn is_absolute(before: &str) -> bool {
    !before.ends_with(|c: char| c.is_alphanumeric() || matches!(c, '_' | '-' | '.' | '/' | '}' | '*' | ':'))
}

#[cfg(test)]
mod tests {
    use super::{PATHS, Tree, check};

    #[test]
    fn absolute_paths_of_one_machine_are_found() {
        for word in PATHS {
            let text = format!("fine\nsee {word}x\n\"{word}x\"\n${{HERE}}{word}x target{word}x\n");
            let findings = check(&Tree::of(&[("README.md", &text)]));
            let lines: Vec<_> = findings.iter().map(|finding| finding.line).collect();
            assert_eq!(lines, [2, 3], "{word}");
        }
    }
}
