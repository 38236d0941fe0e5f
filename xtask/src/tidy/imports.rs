//! Finds the modules of its own crate that a file uses.

use std::collections::{BTreeMap, BTreeSet};

use super::rust_text::{RustFile, is_word, word_offsets};

/// Names that a crate's root re-exports, and the module path of each.
pub(crate) type RootNames = BTreeMap<String, Vec<String>>;

/// A path in the code of a file, from the crate's root: `crate::store::Store` is `["store", "Store"]`.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Import {
    pub(crate) line: usize,
    pub(crate) path: Vec<String>,
}

/// The names that `root`, a crate's `lib.rs`, re-exports from its modules: `pub use store::Store`.
pub(crate) fn root_names(root: &RustFile) -> RootNames {
    let mut names = RootNames::new();
    for offset in word_offsets(&root.code, "use") {
        for Leaf { mut path, alias } in tree_at(&root.code, offset + "use".len()) {
            path.retain(|part| part != "crate" && part != "self");
            let name = alias.or_else(|| path.last().cloned());
            if let Some(name) = name.filter(|_| path.len() > 1) {
                names.insert(name, path);
            }
        }
    }
    names
}

/// The names that a module imports from its own crate by `use`, with the path of each from the root. Child modules can
/// use these names; other modules can if the import is public.
pub(crate) fn child_names(file: &RustFile, module: &[String], modules: &BTreeSet<Vec<String>>) -> RootNames {
    let mut names = RootNames::new();
    for offset in word_offsets(&file.code, "use") {
        if file.is_test(file.line_of(offset)) {
            continue;
        }
        for Leaf { path, alias } in tree_at(&file.code, offset + "use".len()) {
            let Some(first) = path.first() else { continue };
            let is_child = modules.contains(&[module, std::slice::from_ref(first)].concat());
            let is_ours = matches!(first.as_str(), "crate" | "super" | "self");
            let name = alias.or_else(|| path.last().cloned());
            let full = if is_ours {
                from_root(&file.path, path)
            } else {
                is_child.then(|| [module, &path].concat())
            };
            if let Some((name, full)) = name.zip(full) {
                names.insert(name, full);
            }
        }
    }
    names
}

/// The paths into its own crate that the code of `file` uses outside tests, in `use` or elsewhere.
///
/// Names in `names`, which the crate's root re-exports, are resolved to their definitions.
pub(crate) fn imports(file: &RustFile, names: &RootNames) -> Vec<Import> {
    let mut imports = Vec::new();
    for start in ["crate", "super", "self"] {
        for offset in word_offsets(&file.code, start) {
            let line = file.line_of(offset);
            // `super::super::x` is read from its first part on.
            let continues = file.code[..offset].trim_end().ends_with("::");
            let is_path = file.code[offset + start.len()..].trim_start().starts_with("::");
            if continues || !is_path || file.is_test(line) {
                continue;
            }
            for leaf in tree_at(&file.code, offset) {
                if let Some(path) = from_root(&file.path, leaf.path) {
                    let path = match path.first().and_then(|first| names.get(first)) {
                        Some(defined) => defined.iter().cloned().chain(path[1..].iter().cloned()).collect(),
                        None => path,
                    };
                    imports.push(Import { line, path });
                }
            }
        }
    }
    imports
}

/// One path of a `use` tree.
struct Leaf {
    path: Vec<String>,
    alias: Option<String>,
}

/// Expands the path or tree at `at`: `a::{b, c::{d as e}}` has the leaves `a::b` and `a::c::d`.
fn tree_at(code: &str, at: usize) -> Vec<Leaf> {
    let mut leaves = Vec::new();
    expand(&code[at..], &[], &mut leaves);
    leaves
}

/// Parses one tree from `rest` below `prefix`; returns the rest of the text.
fn expand<'a>(rest: &'a str, prefix: &[String], leaves: &mut Vec<Leaf>) -> &'a str {
    let mut path = prefix.to_vec();
    let mut rest = rest.trim_start();
    loop {
        if let Some(group) = rest.strip_prefix('{') {
            return expand_group(group, &path, leaves);
        }
        let length = rest.find(|c: char| !is_word(c)).unwrap_or(rest.len());
        if length > 0 {
            path.push(rest[..length].to_owned());
        }
        rest = rest[length..].trim_start();
        match rest.strip_prefix("::") {
            Some(after) => rest = after.trim_start(),
            None => break,
        }
    }
    let mut alias = None;
    if let Some(after) = rest.strip_prefix("as ") {
        let after = after.trim_start();
        let length = after.find(|c: char| !is_word(c)).unwrap_or(after.len());
        alias = Some(after[..length].to_owned());
        rest = &after[length..];
    }
    leaves.push(Leaf { path, alias });
    rest.trim_start_matches('*')
}

fn expand_group<'a>(group: &'a str, prefix: &[String], leaves: &mut Vec<Leaf>) -> &'a str {
    let mut rest = group.trim_start();
    loop {
        if rest.is_empty() {
            return rest;
        }
        if let Some(after) = rest.strip_prefix('}') {
            return after;
        }
        let before = rest.len();
        rest = expand(rest, prefix, leaves).trim_start();
        rest = rest.strip_prefix(',').unwrap_or(rest).trim_start();
        if rest.len() == before {
            // Not a valid tree: ignore the rest.
            return "";
        }
    }
}

/// Converts a path that begins with `crate`, `self` or `super` to a path from the root of the crate.
fn from_root(file_path: &str, path: Vec<String>) -> Option<Vec<String>> {
    let mut here = module_path(file_path)?;
    let mut parts = path.into_iter().peekable();
    while let Some(part) = parts.peek() {
        match part.as_str() {
            "crate" => here.clear(),
            "self" => {}
            "super" => {
                here.pop()?;
            }
            _ => break,
        }
        parts.next();
    }
    here.extend(parts);
    Some(here)
}

/// `crates/repo/src/store/local.rs` is the module `["store", "local"]`.
pub(crate) fn module_path(file_path: &str) -> Option<Vec<String>> {
    let (_, inside) = file_path.split_once("src/")?;
    let mut parts: Vec<String> = inside.strip_suffix(".rs")?.split('/').map(str::to_owned).collect();
    if matches!(parts.last().map(String::as_str), Some("mod" | "lib" | "main")) {
        parts.pop();
    }
    Some(parts)
}

#[cfg(test)]
mod tests {
    use super::super::rust_text::{Purpose, RustFile};
    use super::{RootNames, imports, root_names};

    fn paths(path: &str, text: &str, names: &RootNames) -> Vec<String> {
        let file = RustFile::new(path, text, Purpose::Production);
        imports(&file, names)
            .into_iter()
            .map(|import| import.path.join("::"))
            .collect()
    }

    #[test]
    fn trees_in_place_paths_and_parents_are_followed() {
        let text = "use crate::{a::{B, c as d}, e};\nfn f() -> crate::g::H { super::x::y() }\n\
                    use std::fmt;\nuse super::super::top::T;\nfn g() { Self::h(); crate::glob::*; }\n\
                    #[cfg(test)]\nmod tests { use crate::only_in_tests; }\n";
        let mut found = paths("crates/r/src/store/local.rs", text, &RootNames::new());
        found.sort();
        assert_eq!(found, ["a::B", "a::c", "e", "g::H", "glob", "store::x::y", "top::T"]);
    }

    #[test]
    fn a_name_of_the_root_leads_to_its_module() {
        let root = RustFile::new(
            "crates/r/src/lib.rs",
            "mod store;\npub use store::{Local, Store as Objects};\npub use self::pack::Pack;\n",
            Purpose::Production,
        );
        let names = root_names(&root);
        let text = "use crate::{Local, Objects};\nfn f(p: &crate::Pack) {}\n";
        assert_eq!(
            paths("crates/r/src/format.rs", text, &names),
            ["store::Local", "store::Store", "pack::Pack"]
        );
    }
}
