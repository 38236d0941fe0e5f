//! Parameters must be names: no tuple pattern, which hides the number of parameters. Functions that other modules call
//! must not have `bool` parameters, whose meaning is not visible in a call.

use std::ops::Range;

use super::Finding;
use super::rust_text::RustFile;

pub(crate) fn check(sources: &[RustFile]) -> Vec<Finding> {
    sources.iter().flat_map(flaws).collect()
}

fn flaws(file: &RustFile) -> Vec<Finding> {
    let mut found = Vec::new();
    let traits = public_traits(&file.code);
    for (name, range) in file.declarations() {
        let line = file.line_of(range.start);
        if file.is_test(line) {
            continue;
        }
        let line_start = file.code[..range.start].rfind('\n').map_or(0, |at| at + 1);
        let is_public = file.code[line_start..range.start].trim_start().starts_with("pub")
            || traits.iter().any(|of_trait| of_trait.contains(&range.start));
        for parameter in parameters(&file.code[range]) {
            let (pattern, kind) = parameter.split_once(':').unwrap_or((parameter, ""));
            let advice = if pattern.trim_start().starts_with('(') {
                format!("{name} takes a tuple apart in its parameters: give each its name, or a struct")
            } else if is_tuple(kind.trim()) {
                format!("{name} takes a tuple, whose parts have no names: give each its own parameter, or a struct")
            } else if is_public && kind.trim() == "bool" {
                format!("{name} takes a bool, which says nothing where it is called: use an enum of two")
            } else {
                continue;
            };
            found.push(Finding::new(&file.path, line, "parameters", advice));
        }
    }
    found
}

/// The bodies of the traits that other modules can use.
fn public_traits(code: &str) -> Vec<Range<usize>> {
    let starts = code.match_indices("trait ").map(|(at, _)| at);
    let public = starts.filter(|at| {
        let line_start = code[..*at].rfind('\n').map_or(0, |end| end + 1);
        code[line_start..*at].trim_start().starts_with("pub")
    });
    public.filter_map(|at| body(code, at)).collect()
}

/// The block that follows `from`.
fn body(code: &str, from: usize) -> Option<Range<usize>> {
    let start = from + code[from..].find('{')?;
    let mut depth = 0_usize;
    for (at, c) in code[start..].char_indices() {
        match c {
            '{' => depth += 1,
            '}' if depth == 1 => return Some(start..start + at),
            '}' => depth -= 1,
            _ => {}
        }
    }
    None
}

/// Whether a type is a tuple: `(u8, u8)`, but neither `()` nor `(dyn Fn() + Sync)`.
fn is_tuple(kind: &str) -> bool {
    kind.starts_with('(') && kind.ends_with(')') && parameters(kind).len() > 1
}

/// The parameters of the function; `function` begins with `fn`.
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

/// Offset of the parenthesis that opens the parameter list, after generic parameters.
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
    use super::{check, parameters};

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
        let lines: Vec<usize> = check(&sources).iter().map(|finding| finding.line).collect();
        assert_eq!(lines, [1, 2]);
    }

    #[test]
    fn tuple_types_and_bools_of_public_traits_are_found() {
        let text = "fn a(pair: (u8, u8), act: &(dyn Fn() + Sync), none: ()) {}\npub trait T {\n    fn b(is_x: bool);\n}\n\
                    trait U {\n    fn c(is_x: bool);\n}\n";
        let sources = [RustFile::new("crates/r/src/a.rs", text, Purpose::Production)];
        let lines: Vec<usize> = check(&sources).iter().map(|finding| finding.line).collect();
        assert_eq!(lines, [1, 3]);
    }
}
