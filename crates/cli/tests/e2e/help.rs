//! Help texts, compared with stored ones: a change of the command line is visible in review.
//!
//! `HOLDFAST_UPDATE_SNAPSHOTS=1 cargo test -p holdfast-cli` updates the stored ones.

use std::fs::{File, read_dir, read_to_string};
use std::io::Write as _;
use std::path::{Path, PathBuf};

use holdfast_cli::commands::verb_paths;

use crate::program::{run, stderr, stdout};

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/e2e/snapshots")
}

fn is_update() -> bool {
    std::env::var_os("HOLDFAST_UPDATE_SNAPSHOTS").is_some()
}

fn compare(name: &str, actual: &str) {
    let path = folder().join(name);
    if is_update() {
        File::create(&path).unwrap().write_all(actual.as_bytes()).unwrap();
        return;
    }
    let stored = read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    assert!(
        stored == actual,
        "{name} has changed; HOLDFAST_UPDATE_SNAPSHOTS=1 stores it anew\n--- stored\n{stored}\n--- actual\n{actual}"
    );
}

fn name_of(path: &str) -> String {
    format!("help-{}.txt", path.replace(' ', "-"))
}

#[test]
fn help_texts_match_the_stored_ones() {
    for (name, words) in [("help.txt", "--help"), ("help-short.txt", "-h")] {
        let output = run(&[words]);
        assert_eq!(output.status.code(), Some(0));
        assert_eq!(stderr(&output), "");
        compare(name, &stdout(&output));
    }
    for path in verb_paths() {
        let mut words: Vec<&str> = path.split(' ').collect();
        words.push("--help");
        let output = run(&words);
        assert_eq!(output.status.code(), Some(0), "{path}");
        compare(&name_of(&path), &stdout(&output));
    }
}

#[test]
fn every_stored_help_belongs_to_a_verb() {
    let mut expected: Vec<String> = verb_paths().iter().map(|path| name_of(path)).collect();
    expected.extend(["help.txt".to_owned(), "help-short.txt".to_owned()]);
    for entry in read_dir(folder()).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        assert!(expected.contains(&name), "{name} is not the help of a verb");
    }
}
