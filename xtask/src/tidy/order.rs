//! Modules of one folder use one another in one direction, and the folders of a crate have an order.
//!
//! A module may use the items of its parent, and a parent may use its children: together they are one unit. A cycle
//! between the children of one folder means that none of them can be read, tested or moved without the others.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::Finding;
use super::imports::{child_names, imports, module_path};
use super::rust_text::RustFile;

/// The folders and files below a crate's `src`, lowest first: each may use only those before it.
pub(crate) type Order = (&'static str, &'static [&'static str]);

pub(crate) const ORDERS: &[Order] = &[
    (
        "image",
        &[
            "error",
            "file",
            "model",
            "allocation_table",
            "pipeline",
            "formats",
            "chain",
            "operations",
            "live",
            "hostile",
        ],
    ),
    (
        "repo",
        &[
            "id",
            "wire",
            "losses",
            "store",
            "key",
            "error",
            "environment",
            "progress",
            "format",
            "vault",
            "repository",
            "writers",
            "packing",
            "read",
            "gc",
            "backup",
            "check",
            "repair",
            "hostile",
        ],
    ),
    (
        "transfer",
        &[
            "error",
            "layout",
            "digest",
            "wire",
            "journal",
            "traffic",
            "convergence",
            "receiver",
            "sender",
            "hostile",
        ],
    ),
    ("host", &["system", "storage", "qemu", "hypervisor", "hostile"]),
    (
        "engine",
        &[
            "notes",
            "job",
            "files",
            "image",
            "repository",
            "machine",
            "restore",
            "guest_files",
            "host_snapshot",
            "container",
            "capture",
            "exchange",
            "container_content",
            "container_restore",
            "template",
            "doctor",
            "hostile",
        ],
    ),
    (
        "live-copy",
        &[
            "request",
            "error",
            "stream",
            "compression_gauge",
            "frame_queue",
            "send_rate",
            "link",
            "source",
            "freeze_commands",
            "tracked_source",
            "seed",
            "target",
            "receive",
            "connect",
            "phases",
            "send",
        ],
    ),
    (
        "migration",
        &[
            "error",
            "streams",
            "memory_relay",
            "service_link",
            "request_link",
            "machine_files",
            "far",
            "forwarded_sockets",
            "socket_host",
            "command_host",
            "image_file",
            "plan",
            "report",
            "disks",
            "migration_tools",
            "memory_convergence",
            "move_progress",
            "disk_copy",
            "complete",
            "memory_watch",
            "move_watch",
            "resolution",
            "memory_receiver",
            "interrupted",
            "post_copy",
            "mover",
            "run",
            "shut_off",
            "container",
        ],
    ),
    (
        "cli",
        &[
            "process", "exit", "units", "errors", "args", "output", "context", "machines", "commands", "program",
        ],
    ),
];

type Module = Vec<String>;

/// The first place where a module uses another module of the folder.
#[derive(Debug, Clone)]
struct Use {
    file: String,
    line: usize,
    names: String,
}

/// The modules of one folder, and the modules that each of them uses.
type Siblings = BTreeMap<String, BTreeMap<String, Use>>;

/// Checks all crates below `crates/`: cycles in every folder, and the given orders.
pub(crate) fn check(sources: &[RustFile], orders: &[Order]) -> Vec<Finding> {
    let mut crates: BTreeMap<&str, Vec<&RustFile>> = BTreeMap::new();
    for file in sources {
        let inside = file.path.strip_prefix("crates/");
        if let Some((name, rest)) = inside.and_then(|path| path.split_once('/'))
            && rest.starts_with("src/")
        {
            crates.entry(name).or_default().push(file);
        }
    }
    let mut findings = Vec::new();
    for (name, files) in &crates {
        let folders = folders_of(files);
        findings.extend(folders.values().flat_map(circles));
        if let Some((_, order)) = orders.iter().find(|(ordered, _)| ordered == name) {
            let roots: BTreeSet<String> = files
                .iter()
                .filter_map(|file| module_path(&file.path)?.into_iter().next())
                .collect();
            findings.extend(out_of_order(name, order, &roots, folders.get(&Module::new())));
        }
    }
    findings
}

/// The uses between the modules of each folder of a crate.
fn folders_of(files: &[&RustFile]) -> BTreeMap<Module, Siblings> {
    let modules: BTreeSet<Module> = files.iter().filter_map(|file| module_path(&file.path)).collect();
    let mut names: BTreeMap<Module, BTreeMap<String, Module>> = BTreeMap::new();
    for file in files {
        if let Some(module) = module_path(&file.path) {
            let known = child_names(file, &module, &modules);
            names.entry(module).or_default().extend(known);
        }
    }
    let mut folders: BTreeMap<Module, Siblings> = BTreeMap::new();
    for file in files {
        let Some(from) = module_path(&file.path) else { continue };
        for import in imports(file, &BTreeMap::new()) {
            let to = defined_in(import.path.clone(), &modules, &names);
            let common = from.iter().zip(&to).take_while(|(left, right)| left == right).count();
            if common < from.len() && common < to.len() {
                let siblings = folders.entry(from[..common].to_vec()).or_default();
                let uses = siblings.entry(from[common].clone()).or_default();
                uses.entry(to[common].clone()).or_insert_with(|| Use {
                    file: file.path.clone(),
                    line: import.line,
                    names: import.path.join("::"),
                });
            }
        }
    }
    folders
}

/// The module that defines the item at a path; re-exports are followed.
fn defined_in(
    mut path: Module,
    modules: &BTreeSet<Module>,
    names: &BTreeMap<Module, BTreeMap<String, Module>>,
) -> Module {
    const STEPS_MAX: usize = 8;
    for _ in 0..STEPS_MAX {
        let length = (0..=path.len())
            .rev()
            .find(|length| modules.contains(&path[..*length]))
            .unwrap_or(0);
        let known = names
            .get(&path[..length])
            .zip(path.get(length))
            .and_then(|(names, name)| names.get(name));
        match known {
            Some(target) if *target != path[..=length] => {
                path = target.iter().chain(&path[length + 1..]).cloned().collect();
            }
            _ => {
                path.truncate(length);
                break;
            }
        }
    }
    path
}

/// One finding for each set of modules that use one another in a cycle: the shortest cycle.
fn circles(siblings: &Siblings) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut seen = BTreeSet::new();
    for start in siblings.keys() {
        if seen.contains(start) {
            continue;
        }
        let Some(circle) = circle_from(siblings, start) else {
            continue;
        };
        let steps = circle.iter().zip(circle.iter().cycle().skip(1));
        let uses: Vec<&Use> = steps.map(|(from, to)| &siblings[from][to]).collect();
        let story: Vec<String> = circle
            .iter()
            .zip(&uses)
            .map(|(name, one)| format!("{name} uses {} ({}:{})", one.names, one.file, one.line))
            .collect();
        let advice = format!(
            "modules of one folder use one another in a circle: {}; move what they share below them",
            story.join(", ")
        );
        findings.push(Finding::new(&uses[0].file, uses[0].line, "order", advice));
        seen.extend(
            reachable(siblings, start)
                .into_iter()
                .filter(|other| reachable(siblings, other).contains(start)),
        );
    }
    findings
}

/// The shortest cycle through a module.
fn circle_from(siblings: &Siblings, start: &str) -> Option<Vec<String>> {
    let mut before: BTreeMap<&str, &str> = BTreeMap::new();
    let mut queue = VecDeque::from([start]);
    while let Some(name) = queue.pop_front() {
        for next in siblings.get(name).into_iter().flat_map(BTreeMap::keys) {
            if next == start {
                let mut circle = vec![name.to_owned()];
                let mut at = name;
                while at != start {
                    at = before[at];
                    circle.push(at.to_owned());
                }
                circle.reverse();
                return Some(circle);
            }
            if !before.contains_key(next.as_str()) {
                before.insert(next, name);
                queue.push_back(next);
            }
        }
    }
    None
}

fn reachable(siblings: &Siblings, start: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let mut left = vec![start.to_owned()];
    while let Some(name) = left.pop() {
        for next in siblings.get(&name).into_iter().flat_map(BTreeMap::keys) {
            if found.insert(next.clone()) {
                left.push(next.clone());
            }
        }
    }
    found
}

/// Modules that use a folder later in the order of the crate, and folders that the order does not list.
fn out_of_order(name: &str, order: &[&str], roots: &BTreeSet<String>, uses: Option<&Siblings>) -> Vec<Finding> {
    let place = |module: &str| order.iter().position(|one| *one == module);
    let mut findings = Vec::new();
    for (from, targets) in uses.into_iter().flatten() {
        for (to, one) in targets {
            if let (Some(upper), Some(lower)) = (place(from), place(to))
                && lower > upper
            {
                let advice = format!(
                    "{from} must not use {to} (here: {}): the folders of {name} have an order, and {to} comes after {from}",
                    one.names
                );
                findings.push(Finding::new(&one.file, one.line, "order", advice));
            }
        }
    }
    let unknown = roots.iter().filter(|root| place(root).is_none());
    let gone = order.iter().filter(|one| !roots.contains(**one));
    for stray in unknown.map(String::as_str).chain(gone.copied()) {
        let advice = format!("{stray} of {name} is in the crate or in ORDERS, but not in both");
        findings.push(Finding::new("xtask/src/tidy/order.rs", 0, "order", advice));
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::super::rust_text::{Purpose, RustFile};
    use super::check;

    fn findings(files: &[(&str, &str)], order: &'static [&'static str]) -> Vec<(String, usize, String)> {
        let sources: Vec<RustFile> = files
            .iter()
            .map(|(path, text)| RustFile::new(&format!("crates/r/src/{path}"), text, Purpose::Production))
            .collect();
        check(&sources, &[("r", order)])
            .into_iter()
            .map(|finding| (finding.path, finding.line, finding.advice))
            .collect()
    }

    #[test]
    fn a_circle_is_found_through_names_that_the_parent_brings_up() {
        let files = [
            ("lib.rs", "mod a;\npub use a::left::Left;\n"),
            ("a.rs", "mod left;\nmod right;\nuse right::Right;\n"),
            ("a/left.rs", "\nuse super::Right;\n"),
            ("a/right.rs", "fn f(left: &crate::Left) {}\n"),
        ];
        let found = findings(&files, &["a"]);
        assert_eq!(found.len(), 1, "{found:?}");
        let (path, line, advice) = &found[0];
        assert_eq!((path.as_str(), *line), ("crates/r/src/a/left.rs", 2));
        assert!(
            advice.contains("left uses a::Right (crates/r/src/a/left.rs:2), right uses Left"),
            "{advice}"
        );
    }

    #[test]
    fn parents_and_tests_make_no_circle() {
        let files = [
            ("lib.rs", "mod a;\n"),
            ("a.rs", "mod left;\nmod right;\nuse left::f;\n"),
            ("a/left.rs", "use super::Thing;\nuse super::right::R;\n"),
            ("a/right.rs", "#[cfg(test)]\nmod tests { use crate::a::left::f; }\n"),
        ];
        assert!(findings(&files, &["a"]).is_empty());
    }

    #[test]
    fn a_folder_uses_only_earlier_folders() {
        let files = [
            ("lib.rs", "mod low;\nmod high;\n"),
            ("low.rs", "use crate::high::X;\n"),
            ("high.rs", "pub struct X;\n"),
            ("stray.rs", ""),
        ];
        let found = findings(&files, &["low", "high", "gone"]);
        let lines: Vec<_> = found.iter().map(|(path, line, _)| (path.as_str(), *line)).collect();
        let list = "xtask/src/tidy/order.rs";
        assert_eq!(lines, [("crates/r/src/low.rs", 1), (list, 0), (list, 0)], "{found:?}");
    }
}
