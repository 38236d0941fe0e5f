//! A parameter is a name: no tuple pattern, which hides how many parameters there are, and in functions that others call no `bool`, which says nothing
//! where it is passed.

use std::collections::BTreeMap;

use super::Finding;
use super::rust_text::RustFile;

/// How many parameters of a crate break the rule still. The numbers only go down.
pub(crate) struct Left {
    pub(crate) crate_name: &'static str,
    pub(crate) tuples: usize,
    pub(crate) bools: usize,
}

pub(crate) const LEFT: &[Left] = &[
    left("cli", 18, 8),
    left("engine", 78, 3),
    left("host", 10, 5),
    left("xapi-server", 4, 1),
];

const fn left(crate_name: &'static str, tuples: usize, bools: usize) -> Left {
    Left {
        crate_name,
        tuples,
        bools,
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Flaw {
    Tuple,
    Bool,
}

pub(crate) fn check(sources: &[RustFile], left: &[Left]) -> Vec<Finding> {
    let mut found: BTreeMap<&str, Vec<(Flaw, Finding)>> = BTreeMap::new();
    for file in sources {
        let crate_name = match file.path.split('/').collect::<Vec<_>>()[..] {
            ["crates" | "rigs", name, "src", ..] => name,
            ["xtask", ..] => "xtask",
            _ => continue,
        };
        found.entry(crate_name).or_default().extend(flaws(file));
    }
    let mut findings = Vec::new();
    for (name, flaws) in found {
        let allowed = left.iter().find(|left| left.crate_name == name);
        let (tuples, bools): (Vec<_>, Vec<_>) = flaws.into_iter().partition(|(flaw, _)| *flaw == Flaw::Tuple);
        let known = allowed.map_or([0, 0], |left| [left.tuples, left.bools]);
        for (flaws, known) in [tuples, bools].into_iter().zip(known) {
            if flaws.len() > known {
                let advice = |finding: &Finding| {
                    format!(
                        "{}; {known} such parameters of {name} are known, and there are {}",
                        finding.advice,
                        flaws.len()
                    )
                };
                let all = flaws.iter().map(|(_, finding)| Finding {
                    advice: advice(finding),
                    ..finding.clone()
                });
                findings.extend(all);
            } else if flaws.len() < known {
                let advice = format!(
                    "{name} has only {} such parameters left, not {known}: lower the number",
                    flaws.len()
                );
                findings.push(Finding::new("xtask/src/tidy/parameters.rs", 0, "parameters", advice));
            }
        }
    }
    findings
}

fn flaws(file: &RustFile) -> Vec<(Flaw, Finding)> {
    let mut found = Vec::new();
    for (name, range) in file.functions() {
        let line = file.line_of(range.start);
        if file.is_test(line) {
            continue;
        }
        let line_start = file.code[..range.start].rfind('\n').map_or(0, |at| at + 1);
        let is_public = file.code[line_start..range.start].trim_start().starts_with("pub");
        for parameter in parameters(&file.code[range]) {
            let (pattern, kind) = parameter.split_once(':').unwrap_or((parameter, ""));
            let (flaw, advice) = if pattern.trim_start().starts_with('(') {
                (
                    Flaw::Tuple,
                    format!("{name} takes a tuple apart in its parameters: give each its name, or a struct"),
                )
            } else if is_public && kind.trim() == "bool" {
                (
                    Flaw::Bool,
                    format!("{name} takes a bool, which says nothing where it is called: use an enum of two"),
                )
            } else {
                continue;
            };
            found.push((flaw, Finding::new(&file.path, line, "parameters", advice)));
        }
    }
    found
}

/// The parameters of the function whose text begins with `fn`.
fn parameters(function: &str) -> Vec<&str> {
    let Some(start) = opening(function) else {
        return Vec::new();
    };
    let (mut depth, mut from, mut found) = (0_usize, start + 1, Vec::new());
    let mut before = ' ';
    for (at, c) in function.char_indices().skip_while(|(at, _)| *at < start) {
        match c {
            '(' | '[' | '{' | '<' => depth += 1,
            '>' if before == '-' => {}
            ')' | ']' | '}' | '>' => {
                depth = depth.saturating_sub(1);
                if depth == 0 {
                    found.push(function[from..at].trim());
                    break;
                }
            }
            ',' if depth == 1 => {
                found.push(function[from..at].trim());
                from = at + 1;
            }
            _ => {}
        }
        before = c;
    }
    found.retain(|parameter| !parameter.is_empty());
    found
}

/// Where the list of parameters opens, behind the generic ones.
fn opening(function: &str) -> Option<usize> {
    let (mut depth, mut before) = (0_usize, ' ');
    for (at, c) in function.char_indices() {
        match c {
            '<' => depth += 1,
            '>' if before != '-' => depth = depth.saturating_sub(1),
            '(' if depth == 0 => return Some(at),
            _ => {}
        }
        before = c;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::super::rust_text::{Purpose, RustFile};
    use super::{Left, check, left, parameters};

    #[test]
    fn parameters_are_split_where_they_end() {
        let text = "fn f<F: Fn(u8, u8) -> bool>(&self, (a, b): (u8, Vec<u8>), act: &dyn Fn(u8) -> u8, c: bool) -> X { y(1, 2) }";
        let expected = ["&self", "(a, b): (u8, Vec<u8>)", "act: &dyn Fn(u8) -> u8", "c: bool"];
        assert_eq!(parameters(text), expected);
        assert_eq!(parameters("fn f() {}"), [""; 0]);
    }

    #[test]
    fn tuples_everywhere_and_bools_of_public_functions_are_found() {
        let text = "fn a((x, y): (u8, u8)) {}\npub(crate) fn b(is_x: bool) {}\nfn c(is_x: bool) { let d = |(x, y): (u8, u8)| x; }\n\
                    #[cfg(test)]\nmod tests {\n    fn e((x, y): (u8, u8)) {}\n}\n";
        let sources = [RustFile::new("crates/r/src/a.rs", text, Purpose::Production)];
        let lines =
            |left: &[Left]| -> Vec<usize> { check(&sources, left).iter().map(|finding| finding.line).collect() };
        assert_eq!(lines(&[]), [1, 2]);
        assert_eq!(lines(&[left("r", 1, 1)]), [0; 0]);
        assert_eq!(lines(&[left("r", 2, 1)]), [0], "the number is stale");
    }
}
