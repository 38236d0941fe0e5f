//! Checks whose callers read only one line of standard output and the exit code.

use crate::program::{stderr, stdout};
use crate::rig::Rig;

/// Asserts that a check exits as unknown; returns its line.
fn unknown(rig: &Rig, words: &[&str]) -> String {
    let line = stdout(&rig.code(3, words));
    assert!(
        line.starts_with("UNKNOWN: ") && line.ends_with('\n'),
        "{words:?}: {line}"
    );
    assert_eq!(line.lines().count(), 1, "{words:?}: {line}");
    line
}

#[test]
fn every_failure_is_one_line_and_exits_as_unknown() {
    let rig = Rig::empty();
    rig.write("wrong.conf", b"[tank]\nhurly = 3\n");
    rig.write("empty.conf", b"");
    for check in ["snapshots", "health", "capacity"] {
        let line = unknown(&rig, &["monitor", check, "nowhere.conf"]);
        assert!(line.contains("nowhere.conf: No such file"), "{line}");
        let line = unknown(&rig, &["monitor", check, "wrong.conf"]);
        assert!(line.contains("line 2: there is no setting \"hurly\""), "{line}");
        unknown(&rig, &["monitor", check, "empty.conf"]);
        let line = unknown(&rig, &["monitor", check, "empty.conf", "--tiemout", "3"]);
        assert!(line.contains("unexpected argument '--tiemout'"), "{line}");
        unknown(&rig, &["monitor", check, "--timeout", "never"]);
    }
    assert!(unknown(&rig, &["monitor"]).contains("name a check"));
    assert!(unknown(&rig, &["monitor", "helth"]).contains("helth"));
    let document = rig.json(3, &["monitor", "health", "nowhere.conf"]);
    assert_eq!(
        (&document["status"], &document["command"]),
        (&"unknown".into(), &"monitor health".into())
    );
    assert!(document["report"]["line"].as_str().unwrap().starts_with("UNKNOWN: "));
}

/// Code 1 would mean a warning, and code 0 success.
#[test]
fn an_unwritable_output_exits_as_unknown() {
    let rig = Rig::empty();
    let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
    let status = rig
        .command(&["monitor", "health", "x.conf"])
        .stdout(full)
        .output()
        .unwrap()
        .status;
    assert_eq!(status.code(), Some(3));
}

#[test]
fn failing_metrics_keep_the_old_file_and_exit_as_usual() {
    let rig = Rig::empty();
    rig.write("old.prom", b"old\n");
    assert_eq!(
        rig.error(1, &["monitor", "metrics", "nowhere.conf", "--output", "old.prom"])
            .0,
        "io"
    );
    assert_eq!(rig.read("old.prom"), b"old\n");
    let output = rig.code(2, &["monitor", "metrics", "--outptu", "x"]);
    assert!(stdout(&output).is_empty() && !stderr(&output).is_empty());
}
