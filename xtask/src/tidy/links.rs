//! Documents are reached and lead somewhere.

use std::collections::BTreeSet;

use super::{Finding, Tree};

/// The documents that a reader starts from.
const ENTRIES: [&str; 2] = ["README.md", "docs/README.md"];

pub(crate) fn check(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut reached = BTreeSet::new();
    for (path, text) in tree.iter() {
        if is_markdown(path) {
            for link in links(text) {
                let target = resolve(path, &link.target);
                match target.filter(|target| tree.exists(target)) {
                    Some(target) if ENTRIES.contains(&path) => {
                        reached.insert(target);
                    }
                    Some(_) => {}
                    None => {
                        let advice = format!("{} leads nowhere: correct the link or write the page", link.target);
                        findings.push(Finding::new(path, link.line, "link", advice));
                    }
                }
            }
        } else {
            findings.extend(
                named_documents(path, text)
                    .filter(|(_, named)| !tree.exists(named))
                    .map(|(line, named)| {
                        let advice = format!("{named} does not exist: correct the path or write the page");
                        Finding::new(path, line, "link", advice)
                    }),
            );
        }
    }
    let pages = tree
        .iter()
        .map(|(path, _)| path)
        .filter(|path| path.starts_with("docs/") && is_markdown(path));
    for page in pages.filter(|page| !ENTRIES.contains(page) && !reached.contains(*page)) {
        let advice = "no one finds this page: link it from docs/README.md";
        findings.push(Finding::new(page, 0, "link", advice));
    }
    findings
}

fn is_markdown(path: &str) -> bool {
    path.rsplit_once('.').is_some_and(|(_, extension)| extension == "md")
}

struct Link {
    line: usize,
    /// Without the anchor; never empty.
    target: String,
}

/// The links of a document to other files; those in code blocks and to the web are left out.
fn links(text: &str) -> Vec<Link> {
    let mut links = Vec::new();
    let mut in_code = false;
    for (index, line) in text.lines().enumerate() {
        in_code ^= line.trim_start().starts_with("```");
        if in_code {
            continue;
        }
        // Every other part between backticks is code.
        for prose in line.split('`').step_by(2) {
            for (offset, mark) in prose.match_indices("](") {
                let rest = &prose[offset + mark.len()..];
                let target = rest.split([')', ' ']).next().unwrap_or_default();
                let target = target.split('#').next().unwrap_or_default();
                if !target.is_empty() && !target.contains(':') {
                    links.push(Link {
                        line: index + 1,
                        target: target.to_owned(),
                    });
                }
            }
        }
    }
    links
}

/// The path that `target` means in the document at `from`; `None` where it leaves the repository.
fn resolve(from: &str, target: &str) -> Option<String> {
    let mut parts: Vec<&str> = from.split('/').collect();
    parts.pop();
    for part in target.split('/') {
        match part {
            "" | "." => {}
            ".." => {
                parts.pop()?;
            }
            _ => parts.push(part),
        }
    }
    Some(parts.join("/"))
}

/// Line and path of each page (`docs/....md`) that source, scripts and settings name as `docs/...`.
fn named_documents<'a>(path: &'a str, text: &'a str) -> impl Iterator<Item = (usize, &'a str)> + 'a {
    // Its samples are documents that must not exist.
    let is_this_file = path == "xtask/src/tidy/links.rs";
    let is_path = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.' | '/');
    text.lines()
        .enumerate()
        .filter(move |_| !is_this_file)
        .flat_map(move |(index, line)| {
            line.match_indices("docs/").filter_map(move |(offset, _)| {
                let begins = !line[..offset].ends_with(is_path);
                let rest = &line[offset..];
                let named = rest[..rest.find(|c: char| !is_path(c)).unwrap_or(rest.len())].trim_end_matches(['.', '/']);
                (begins && is_markdown(named)).then_some((index + 1, named))
            })
        })
}

#[cfg(test)]
mod tests {
    use super::{Tree, check};

    fn places(files: &[(&str, &str)]) -> Vec<(String, usize)> {
        check(&Tree::of(files))
            .into_iter()
            .map(|finding| (finding.path, finding.line))
            .collect()
    }

    #[test]
    fn links_resolve_from_where_they_stand() {
        let files = [
            (
                "README.md",
                "[a](docs/a.md#part) [web](https://x.org/y.md) [here](#part)\n`[code](no.md)`\n",
            ),
            (
                "docs/README.md",
                "[b](b.md \"title\") [up](../README.md)\n```\n[no](no.md)\n```\n[gone](gone.md)\n",
            ),
            ("docs/a.md", "[b](./b.md) [folder](../docs)\n[out](../../x.md)\n"),
            ("docs/b.md", ""),
        ];
        assert_eq!(
            places(&files),
            [("docs/README.md".to_owned(), 5), ("docs/a.md".to_owned(), 2)]
        );
    }

    #[test]
    fn a_page_that_no_entry_links_is_found() {
        let files = [
            ("README.md", "[a](docs/a.md)"),
            ("docs/a.md", "[b](b.md)"),
            ("docs/b.md", ""),
        ];
        assert_eq!(places(&files), [("docs/b.md".to_owned(), 0)]);
    }

    #[test]
    fn documents_named_in_code_exist() {
        let code =
            "//! See docs/a.md.\n//! See `docs/gone.md`, qemu's docs/interop/qcow2.txt, https://docs.rs/docs/x.md\n";
        let files = [
            ("README.md", "[a](docs/a.md)"),
            ("docs/a.md", ""),
            ("crates/x/src/lib.rs", code),
        ];
        assert_eq!(places(&files), [("crates/x/src/lib.rs".to_owned(), 2)]);
    }
}
