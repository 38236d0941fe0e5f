//! Checks that every document is linked, and that no link is broken.

use std::collections::BTreeSet;

use super::anchors::anchors;
use super::{Finding, Tree};

/// The documents at which readers start.
const ENTRIES: [&str; 2] = ["README.md", "docs/README.md"];

pub(crate) fn check(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut reached = BTreeSet::new();
    for (path, text) in tree.iter() {
        let links = if is_markdown(path) {
            links(path, text)
        } else {
            named_documents(path, text)
        };
        for link in links {
            if let Some(advice) = broken(tree, &link) {
                findings.push(Finding::new(path, link.line, "link", advice));
            } else if ENTRIES.contains(&path) {
                reached.extend(link.target);
            }
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
    /// The link as written.
    text: String,
    /// The path; `None` if it is outside of the repository.
    target: Option<String>,
    /// The anchor; empty for the whole document.
    anchor: String,
}

/// The fault of a link, if any.
fn broken(tree: &Tree, link: &Link) -> Option<String> {
    let Some(target) = link.target.as_deref().filter(|target| tree.exists(target)) else {
        return Some(format!(
            "{} leads nowhere: correct the link or write the page",
            link.text
        ));
    };
    if link.anchor.is_empty() || !is_markdown(target) {
        return None;
    }
    let anchors = anchors(tree.get(target).unwrap_or_default());
    let advice = || {
        format!(
            "{target} has no heading #{}: correct the anchor of {}",
            link.anchor, link.text
        )
    };
    (!anchors.contains(&link.anchor)).then(advice)
}

/// The links of a document to files and headings. Links in code blocks and to the web are ignored.
fn links(from: &str, text: &str) -> Vec<Link> {
    let mut links = Vec::new();
    let mut in_code = false;
    for (index, line) in text.lines().enumerate() {
        in_code ^= line.trim_start().starts_with("```");
        if in_code {
            continue;
        }
        // Every second part between backticks is code.
        for prose in line.split('`').step_by(2) {
            for (offset, mark) in prose.match_indices("](") {
                let rest = &prose[offset + mark.len()..];
                let text = rest.split([')', ' ']).next().unwrap_or_default();
                let (target, anchor) = text.split_once('#').unwrap_or((text, ""));
                if !text.is_empty() && !target.contains(':') {
                    links.push(Link {
                        line: index + 1,
                        text: text.to_owned(),
                        target: if target.is_empty() {
                            Some(from.to_owned())
                        } else {
                            resolve(from, target)
                        },
                        anchor: anchor.to_owned(),
                    });
                }
            }
        }
    }
    links
}

/// Resolves `target` in the document at `from`; `None` if the path is outside of the repository.
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

/// Each page (`docs/....md`, with or without an anchor) that sources, scripts and settings refer to as `docs/...`.
fn named_documents(path: &str, text: &str) -> Vec<Link> {
    // The samples in these files refer to documents that must not exist.
    if path.starts_with("xtask/src/tidy/") {
        return Vec::new();
    }
    let is_word = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-');
    let is_path = |c: char| is_word(c) || matches!(c, '.' | '/');
    let mut links = Vec::new();
    for (index, line) in text.lines().enumerate() {
        for (offset, _) in line.match_indices("docs/") {
            let rest = &line[offset..];
            let (named, rest) = rest.split_at(rest.find(|c: char| !is_path(c)).unwrap_or(rest.len()));
            let named = named.trim_end_matches(['.', '/']);
            if line[..offset].ends_with(is_path) || !is_markdown(named) {
                continue;
            }
            let anchor = rest.strip_prefix('#').unwrap_or_default();
            links.push(Link {
                line: index + 1,
                text: named.to_owned(),
                target: Some(named.to_owned()),
                anchor: anchor.split(|c| !is_word(c)).next().unwrap_or_default().to_owned(),
            });
        }
    }
    links
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
                "[a](docs/a.md#part) [web](https://x.org/y.md) [here](#part)\n`[code](no.md)`\n# Part\n",
            ),
            (
                "docs/README.md",
                "[b](b.md \"title\") [up](../README.md)\n```\n[no](no.md)\n```\n[gone](gone.md)\n",
            ),
            (
                "docs/a.md",
                "# Part\n[b](./b.md) [folder](../docs)\n[out](../../x.md)\n",
            ),
            ("docs/b.md", ""),
        ];
        assert_eq!(
            places(&files),
            [("docs/README.md".to_owned(), 5), ("docs/a.md".to_owned(), 3)]
        );
    }

    #[test]
    fn anchors_are_headings_of_their_document() {
        let files = [
            (
                "README.md",
                "# Top\n[a](docs/a.md#part) [top](#top)\n[gone](docs/a.md#gone)\n[here](#part)\n[file](x.toml#a)\n",
            ),
            ("docs/a.md", "## Part\n"),
            ("x.toml", "# docs/a.md#part\n# see docs/a.md#old.\n"),
        ];
        assert_eq!(
            places(&files),
            [
                ("README.md".to_owned(), 3),
                ("README.md".to_owned(), 4),
                ("x.toml".to_owned(), 2)
            ]
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
