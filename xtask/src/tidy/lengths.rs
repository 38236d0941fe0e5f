//! Limits the length of files and functions.
//!
//! A longer file or function contains two ideas: split it by concept, not in the middle. Exceptions are listed in
//! [`RATCHET`] with their length, and may only shrink.

use super::Finding;
use super::rust_text::RustFile;

const FILE_LINE_COUNT_MAX: usize = 500;
const FUNCTION_LINE_COUNT_MAX: usize = 70;

/// An exception: `path` for a file, `path name` for a function, and its present number of lines.
pub(crate) type Ratchet = &'static [(&'static str, usize)];

/// Exceptions, which may only shrink. New files and functions must not be added.
pub(crate) const RATCHET: Ratchet = &[];

pub(crate) fn check(sources: &[RustFile], ratchet: Ratchet) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut used = Vec::new();
    let mut measure = |name: &str, path: &str, line: usize, line_count: usize, line_count_max: usize| {
        let exception = ratchet.iter().find(|(exception, _)| *exception == name);
        used.extend(exception.filter(|_| line_count > line_count_max).map(|(name, _)| *name));
        let advice = match exception {
            Some((_, recorded)) if line_count > *recorded && line_count > line_count_max => {
                format!("{name} grew from {recorded} to {line_count} lines: exceptions may only shrink, split it")
            }
            Some((_, recorded)) if line_count < *recorded && line_count > line_count_max => {
                format!("{name} shrank from {recorded} to {line_count} lines: write {line_count} into RATCHET")
            }
            None if line_count > line_count_max => {
                format!("{name} has {line_count} lines without tests, more than {line_count_max}: split it by concept")
            }
            _ => return,
        };
        findings.push(Finding::new(path, line, "length", advice));
    };
    for file in sources {
        measure(
            &file.path,
            &file.path,
            0,
            file.production_line_count(),
            FILE_LINE_COUNT_MAX,
        );
        for (function, range) in file.functions() {
            let first = file.line_of(range.start);
            if !file.is_test(first) {
                let name = format!("{} {function}", file.path);
                measure(
                    &name,
                    &file.path,
                    first,
                    file.line_of(range.end) - first + 1,
                    FUNCTION_LINE_COUNT_MAX,
                );
            }
        }
    }
    let stale = ratchet.iter().filter(|(name, _)| !used.contains(name));
    findings.extend(stale.map(|(name, _)| {
        let advice = format!("{name} is within the limit, or gone: take it out of RATCHET");
        Finding::new("xtask/src/tidy/lengths.rs", 0, "length", advice)
    }));
    findings
}

#[cfg(test)]
mod tests {
    use super::super::rust_text::{Purpose, RustFile};
    use super::{Finding, check};

    fn file(line_count: usize, test_line_count: usize) -> RustFile {
        let tests = format!(
            "#[cfg(test)]\nmod tests {{\n{}}}\n",
            "    // more\n".repeat(test_line_count)
        );
        RustFile::new(
            "a.rs",
            &("const A: u8 = 1;\n".repeat(line_count) + &tests),
            Purpose::Production,
        )
    }

    fn function(line_count: usize) -> RustFile {
        let body = "    step();\n".repeat(line_count - 2);
        RustFile::new("a.rs", &format!("fn long() {{\n{body}}}\n"), Purpose::Production)
    }

    #[test]
    fn tests_do_not_count_and_the_limit_is_allowed() {
        assert_eq!(check(&[file(500, 400)], &[]), [] as [Finding; 0]);
        assert_eq!(check(&[file(501, 0)], &[]).len(), 1);
        assert_eq!(check(&[function(70)], &[]), [] as [Finding; 0]);
        assert_eq!(check(&[function(71)], &[])[0].line, 1);
    }

    #[test]
    fn exceptions_only_shrink_and_leave_when_they_are_done() {
        assert_eq!(check(&[file(600, 0)], &[("a.rs", 600)]), [] as [Finding; 0]);
        assert!(check(&[file(601, 0)], &[("a.rs", 600)])[0].advice.contains("grew"));
        assert!(check(&[file(590, 0)], &[("a.rs", 600)])[0].advice.contains("write 590"));
        assert!(
            check(&[file(400, 0)], &[("a.rs", 600)])[0]
                .advice
                .contains("take it out")
        );
        assert_eq!(check(&[function(90)], &[("a.rs long", 90)]), [] as [Finding; 0]);
        assert!(check(&[], &[("a.rs long", 90)])[0].advice.contains("take it out"));
    }
}
