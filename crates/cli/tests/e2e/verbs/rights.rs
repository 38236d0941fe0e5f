//! Parts of a repository that the user may not read: they are not reported as damage, and nothing is removed because of
//! them.

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Command;

use crate::program::{stderr, stdout};
use crate::rig::{Rig, noise};

/// Runs the program in the rig as a user without root's rights; returns its exit code and its output.
#[expect(clippy::disallowed_methods, reason = "only the system's program takes rights away")]
fn run_without_rights(rig: &Rig, words: &[&str]) -> (Option<i32>, String) {
    let program = rig.command(words);
    let output = if rustix::process::geteuid().is_root() {
        let mut command = Command::new("setpriv");
        command.args(["--inh-caps=-all", "--bounding-set=-all", "--"]);
        command.arg(program.get_program()).args(program.get_args());
        let set = program.get_envs().filter_map(|(name, value)| Some((name, value?)));
        command.env_clear().envs(set).current_dir(rig.path(".")).output()
    } else {
        rig.command(words).output()
    };
    let output = output.unwrap();
    (output.status.code(), stdout(&output) + &stderr(&output))
}

fn allow(path: &Path, mode: u32) {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
}

/// All objects of the repository.
fn objects(rig: &Rig) -> Vec<String> {
    let mut found = Vec::new();
    let mut folders = vec!["repo".to_owned()];
    while let Some(folder) = folders.pop() {
        for name in rig.names(&folder) {
            let path = format!("{folder}/{name}");
            if rig.path(&path).is_dir() {
                folders.push(path);
            } else {
                // Scrub records what it has read.
                if folder != "repo/scrub" {
                    found.push(path);
                }
            }
        }
    }
    found.sort();
    found
}

#[test]
fn unreadable_files_are_not_reported_as_damage_and_nothing_is_removed() {
    let rig = Rig::new();
    for seed in [1, 2] {
        rig.write("a.raw", &noise(300_000, seed));
        rig.ok(&["backup", "a.raw", "--machine", "a"]);
    }
    let all = objects(&rig);
    for kind in ["repo/packs/", "repo/index/", "repo/snapshots/"] {
        // scrub, gc and repair are refused; verify and list may succeed, because they may not need the unreadable
        // object.
        for name in all.iter().filter(|name| name.starts_with(kind)) {
            let before: Vec<String> = objects(&rig);
            allow(&rig.path(name), 0o000);
            for words in [&["scrub"][..], &["gc"], &["repair"], &["verify"], &["list"]] {
                let (code, text) = run_without_rights(&rig, words);
                let is_refused = text.contains("is not permitted") || text.contains("may not be");
                let may_succeed = ["verify", "list"].contains(&words[0]) && code == Some(0);
                assert!(
                    code == Some(1) && is_refused || may_succeed,
                    "{name} {words:?}: {code:?} {text}"
                );
            }
            allow(&rig.path(name), 0o600);
            let left = objects(&rig);
            assert!(
                before.iter().all(|object| left.contains(object)),
                "{name}: {left:?} of {before:?}"
            );
        }
    }
    rig.ok(&["verify"]);
    rig.ok(&["scrub"]);
    rig.ok(&["gc"]);
}
