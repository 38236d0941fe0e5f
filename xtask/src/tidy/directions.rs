//! Dependencies point down: between crates (Cargo.toml) and between modules inside a crate (imports).

use std::collections::BTreeMap;

use super::imports::{imports, root_names};
use super::modules::crate_folders;
use super::rust_text::{Purpose, RustFile};
use super::{Finding, Tree};

/// A crate below `crates/`, and the crates that it may depend on. ARCHITECTURE.md has the same picture.
pub(crate) type Level = (&'static str, &'static [&'static str]);

pub(crate) const LEVELS: &[Level] = &[
    ("block", &[]),
    ("image", &["block"]),
    ("repo", &["block"]),
    ("policy", &[]),
    ("hardware", &["block"]),
    ("guest-files", &["block"]),
    ("archive", &["block", "image", "hardware"]),
    ("host", &["block", "hardware"]),
    ("appliance", &["block", "guest-files", "host"]),
    ("serve", &["block"]),
    ("transfer", &["block"]),
    (
        "engine",
        &[
            "block",
            "image",
            "repo",
            "policy",
            "hardware",
            "guest-files",
            "archive",
            "host",
            "appliance",
            "serve",
        ],
    ),
    ("daemon", &["block", "policy", "host", "engine"]),
    ("replicate", &["block", "policy", "host", "engine"]),
    (
        "live-copy",
        &["block", "image", "transfer", "repo", "serve", "host", "engine"],
    ),
    (
        "migration",
        &["block", "image", "repo", "serve", "host", "engine", "live-copy"],
    ),
    (
        "cli",
        &[
            "block",
            "image",
            "repo",
            "policy",
            "hardware",
            "guest-files",
            "archive",
            "host",
            "appliance",
            "serve",
            "transfer",
            "engine",
            "daemon",
            "replicate",
            "live-copy",
            "migration",
        ],
    ),
];

/// Crates below `rigs/`, on which only tests may depend, and the crates that each may depend on. A rig shares no code
/// with the part that it replaces: tests cannot find an error that both ends have.
pub(crate) const RIGS: &[Level] = &[
    ("qemu-model", &["block", "serve"]),
    ("xapi-server", &["block", "serve"]),
    ("test-kit", &["block", "host"]),
    ("sanoid-runner", &[]),
];

/// Files that must not use some modules of their own crate.
pub(crate) struct ModuleRule {
    /// The rule applies to the file `WITHIN.rs` and all files below the folder `WITHIN`.
    within: &'static str,
    /// Modules by their paths from the crate's root, including all modules below them.
    must_not_use: &'static [&'static str],
    reason: &'static str,
}

pub(crate) const MODULE_RULES: &[ModuleRule] = &[
    ModuleRule {
        within: "crates/block/src/extent",
        must_not_use: &["device", "error", "memory"],
        reason: "extents are arithmetic and know no device",
    },
    ModuleRule {
        within: "crates/block/src/device",
        must_not_use: &["memory"],
        reason: "the traits know none of their implementations",
    },
    ModuleRule {
        within: "crates/policy/src/span",
        must_not_use: &["plan", "policy", "reason", "period"],
        reason: "a span is calendar arithmetic and knows no rules",
    },
    ModuleRule {
        within: "crates/policy/src/period",
        must_not_use: &["plan", "policy", "reason", "span"],
        reason: "a period is calendar arithmetic and knows no rules",
    },
    ModuleRule {
        within: "crates/policy/src/calendar",
        must_not_use: &["plan", "policy", "reason", "span", "period"],
        reason: "a calendar is calendar arithmetic and knows no rules",
    },
];

/// Checks the dependencies in each crate's Cargo.toml, including those for tests.
pub(crate) fn check_crates(tree: &Tree, levels: &[Level], rigs: &[Level]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for folder in crate_folders(tree) {
        let (name, known, list) = match folder.split_once('/') {
            Some(("crates", name)) => (name, levels, "LEVELS"),
            Some(("rigs", name)) => (name, rigs, "RIGS"),
            _ => continue,
        };
        let manifest = format!("{folder}/Cargo.toml");
        let Some((_, allowed)) = known.iter().find(|(level, _)| *level == name) else {
            let advice = format!("{name} has no level: add it to {list} in xtask and to ARCHITECTURE.md");
            findings.push(Finding::new(&manifest, 0, "direction", advice));
            continue;
        };
        let text = tree.get(&manifest).unwrap_or_default();
        for (line, dependency, purpose) in own_dependencies(text) {
            let is_rig_of_tests = purpose == Purpose::Test && rigs.iter().any(|(rig, _)| *rig == dependency);
            // Tests that need a feature of their own crate depend on the crate itself.
            if dependency != name && !is_rig_of_tests && !allowed.contains(&dependency) {
                let advice = format!(
                    "{name} must not depend on {dependency} (only on: {}): if both need it, it belongs lower",
                    if allowed.is_empty() {
                        "nothing".to_owned()
                    } else {
                        allowed.join(", ")
                    }
                );
                findings.push(Finding::new(&manifest, line, "direction", advice));
            }
        }
    }
    let crates = levels.iter().map(|(name, _)| ("crates", *name, "LEVELS"));
    let rigs = rigs.iter().map(|(name, _)| ("rigs", *name, "RIGS"));
    for (folder, name, list) in crates.chain(rigs) {
        if tree.get(&format!("{folder}/{name}/Cargo.toml")).is_none() {
            let advice = format!("there is no crate {name}: take it out of {list}");
            findings.push(Finding::new("xtask/src/tidy/directions.rs", 0, "direction", advice));
        }
    }
    findings
}

/// Checks the imports of the files in `rules`, except in tests.
pub(crate) fn check_modules(sources: &[RustFile], rules: &[ModuleRule]) -> Vec<Finding> {
    let names_by_crate: BTreeMap<_, _> = sources
        .iter()
        .filter_map(|file| Some((file.path.strip_suffix("/src/lib.rs")?, root_names(file))))
        .collect();
    let mut findings = Vec::new();
    for rule in rules {
        let mut matched = false;
        for file in sources.iter().filter(|file| is_within(&file.path, rule.within)) {
            matched = true;
            let names = file
                .path
                .split_once("/src/")
                .and_then(|(folder, _)| names_by_crate.get(folder));
            for import in imports(file, names.unwrap_or(&BTreeMap::new())) {
                let path = import.path.join("::");
                let forbidden = rule.must_not_use.iter().find(|module| {
                    path.strip_prefix(**module)
                        .is_some_and(|rest| rest.is_empty() || rest.starts_with("::"))
                });
                if let Some(module) = forbidden {
                    let advice = format!("must not use {module} (here: {path}): {}", rule.reason);
                    findings.push(Finding::new(&file.path, import.line, "direction", advice));
                }
            }
        }
        if !matched {
            let advice = format!(
                "the rule for {} matches no file: correct it or take it out",
                rule.within
            );
            findings.push(Finding::new("xtask/src/tidy/directions.rs", 0, "direction", advice));
        }
    }
    findings
}

fn is_within(path: &str, within: &str) -> bool {
    path.strip_prefix(within)
        .is_some_and(|rest| rest == ".rs" || rest.starts_with('/'))
}

/// Line, name (without `holdfast-`) and purpose of each dependency on a crate of this workspace.
fn own_dependencies(manifest: &str) -> Vec<(usize, &str, Purpose)> {
    let mut in_dependencies = false;
    let mut purpose = Purpose::Production;
    let mut found = Vec::new();
    for (index, line) in manifest.lines().enumerate() {
        let line = line.trim();
        let name = if let Some(section) = line.strip_prefix('[') {
            let section = section.trim_end_matches(']');
            in_dependencies = section.ends_with("dependencies");
            purpose = if section.starts_with("dev-") {
                Purpose::Test
            } else {
                Purpose::Production
            };
            // [dependencies.holdfast-block]
            section.split_once("dependencies.").map(|(_, name)| name)
        } else {
            Some(line).filter(|_| in_dependencies)
        };
        if let Some(name) = name.and_then(|name| name.trim_matches('"').strip_prefix("holdfast-")) {
            let end = name
                .find(|c: char| !c.is_alphanumeric() && c != '-')
                .unwrap_or(name.len());
            found.push((index + 1, &name[..end], purpose));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::super::rust_text::{Purpose, RustFile};
    use super::{Level, ModuleRule, Tree, check_crates, check_modules};

    #[test]
    fn a_crate_depends_on_lower_crates_only() {
        let manifest = "[package]\nname = \"holdfast-image\"\n[dependencies]\nholdfast-block.workspace = true\n\
                        [dev-dependencies]\nholdfast-repo = { path = \"../repo\" }\n[dependencies.holdfast-engine]\n";
        let tree = Tree::of(&[
            ("crates/image/Cargo.toml", manifest),
            ("crates/block/Cargo.toml", ""),
            ("crates/stray/Cargo.toml", ""),
        ]);
        let levels: &[Level] = &[("block", &[]), ("image", &["block"]), ("gone", &[])];
        let findings = check_crates(&tree, levels, &[]);
        let places: Vec<_> = findings
            .iter()
            .map(|finding| (finding.path.as_str(), finding.line))
            .collect();
        assert_eq!(
            places,
            [
                ("crates/image/Cargo.toml", 6),
                ("crates/image/Cargo.toml", 7),
                ("crates/stray/Cargo.toml", 0),
                ("xtask/src/tidy/directions.rs", 0),
            ],
            "{findings:?}"
        );
    }

    #[test]
    fn only_tests_depend_on_a_rig_and_a_rig_keeps_to_its_own() {
        let tree = Tree::of(&[
            (
                "crates/host/Cargo.toml",
                "[dev-dependencies]\nholdfast-server.workspace = true\n",
            ),
            (
                "crates/cli/Cargo.toml",
                "[dependencies]\nholdfast-server.workspace = true\n",
            ),
            (
                "rigs/server/Cargo.toml",
                "[dependencies]\nholdfast-host.workspace = true\n",
            ),
            ("rigs/stray/Cargo.toml", ""),
        ]);
        let findings = check_crates(&tree, &[("host", &[]), ("cli", &["host"])], &[("server", &[])]);
        let places: Vec<_> = findings
            .iter()
            .map(|finding| (finding.path.as_str(), finding.line))
            .collect();
        let expected = [
            ("crates/cli/Cargo.toml", 2),
            ("rigs/server/Cargo.toml", 2),
            ("rigs/stray/Cargo.toml", 0),
        ];
        assert_eq!(places, expected, "{findings:?}");
    }

    #[test]
    fn a_forbidden_module_use_is_found() {
        let rules = [ModuleRule {
            within: "crates/repo/src/format",
            must_not_use: &["store"],
            reason: "layout is pure",
        }];
        let sources = [
            ("crates/repo/src/lib.rs", "pub use store::Store;"),
            (
                "crates/repo/src/format.rs",
                "use crate::storehouse::X;\nuse super::store;\n",
            ),
            ("crates/repo/src/format/pack.rs", "fn f(s: &dyn crate::Store) {}"),
            ("crates/repo/src/writer.rs", "use crate::store::Store;"),
        ]
        .map(|(path, text)| RustFile::new(path, text, Purpose::Production));
        let findings = check_modules(&sources, &rules);
        let places: Vec<_> = findings
            .iter()
            .map(|finding| (finding.path.as_str(), finding.line))
            .collect();
        assert_eq!(
            places,
            [("crates/repo/src/format.rs", 2), ("crates/repo/src/format/pack.rs", 1)]
        );
        assert!(findings[0].advice.contains("layout is pure"));
        assert_eq!(
            check_modules(&[], &rules).len(),
            1,
            "a rule that matches nothing is stale"
        );
    }
}
