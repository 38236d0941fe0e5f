//! Ctrl-C in the middle of a job: the program ends by the signal, no partial files remain, and the next job works.

use std::io::Write as _;
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Output, Stdio};
use std::time::Duration;

use holdfast_block::{Clock as _, SystemClock};
use rustix::process::{Pid, Signal, kill_process};

use crate::host::{system, text};
use crate::program::{stderr, stdout};
use crate::rig::{Rig, assert_runs, document_of, noise};

const MIB: usize = 1 << 20;
/// Attempts for the signal to come in the middle of a job, on a busy host.
const ATTEMPTS: usize = 30;

/// Runs the program until `has_begun`, and sends SIGINT; repeats that until the signal comes in the middle of the job.
///
/// `undo` removes the result of a job that ended before the signal.
fn interrupt(rig: &Rig, words: &[&str], has_begun: impl Fn() -> bool, undo: impl Fn()) -> Output {
    let clock = SystemClock::new();
    for _ in 0..ATTEMPTS {
        let mut child = rig.command(words).spawn().unwrap();
        while !has_begun() && child.try_wait().unwrap().is_none() {
            clock.sleep(Duration::from_micros(200));
        }
        if child.try_wait().unwrap().is_none() {
            kill_process(Pid::from_child(&child), Signal::INT).unwrap();
        }
        let output = child.wait_with_output().unwrap();
        if output.status.signal() == Some(2) {
            return output;
        }
        assert_eq!(output.status.code(), Some(0), "{words:?}: {}", stderr(&output));
        undo();
    }
    panic!("{words:?} always ended before the signal");
}

fn has_partial(rig: &Rig) -> bool {
    rig.names(".").iter().any(|name| name.ends_with(".partial"))
}

fn remove(rig: &Rig, name: &str) {
    std::fs::remove_file(rig.path(name)).unwrap();
}

/// The reader of the output hangs: Ctrl-C still ends the program, and soon.
#[test]
fn an_interrupt_ends_a_command_with_a_blocked_output() {
    let rig = Rig::new();
    rig.write("web1.raw", &noise(8 * MIB, 5));
    rig.ok(&["backup", "web1.raw", "--machine", "web1"]);
    rig.ok(&["image", "convert", "web1.raw", "web1.qcow2"]);
    std::fs::create_dir(rig.path("tmp")).unwrap();
    let clock = SystemClock::new();
    for words in [
        &["export", "web1", "-", "--format", "xva"][..],
        &["export", "web1", "-", "--format", "ova"],
        &["export", "web1", "-", "--format", "vma"],
        &["compress", "web1.raw"],
        &["restore", "web1", "-"],
        &["image", "convert", "web1.qcow2", "-"],
    ] {
        let mut command = rig.command(words);
        let command = command.env("TMPDIR", rig.path("tmp"));
        let (reader, writer) = std::io::pipe().unwrap();
        let mut child = command.stdout(writer).stderr(Stdio::null()).spawn().unwrap();
        // The pipe is full: the amount in it does not change for a while.
        let held = || rustix::io::ioctl_fionread(&reader).unwrap();
        let mut before = 0;
        while before < 4096 || held() != before {
            assert_runs(&mut child);
            before = held();
            clock.sleep(Duration::from_millis(300));
        }
        let start = clock.now();
        kill_process(Pid::from_child(&child), Signal::INT).unwrap();
        let status = child.wait().unwrap();
        assert_eq!(status.signal(), Some(2), "{words:?}: {status}");
        assert!(clock.now().saturating_sub(start) < Duration::from_secs(2), "{words:?}");
        drop(reader);
    }
}

/// Nothing is changed if the output cannot be written.
#[test]
fn closed_standard_streams_are_refused() {
    let rig = Rig::new();
    rig.write("web1.raw", &noise(MIB, 5));
    // Returns the exit code, and standard error.
    let run = |line: &str| {
        let program = rig.command(&[]).get_program().display().to_string();
        let folder = rig.path(".").display().to_string();
        let script = format!("cd {folder}; HOLDFAST_REPOSITORY=repo {program} 2>err {line}; echo $?");
        let output = system("/bin/sh", &["-c", &script]).unwrap();
        let code = output.lines().last().unwrap_or_default().to_owned();
        (code, String::from_utf8(rig.read("err")).unwrap())
    };
    for line in [
        "image convert web1.raw - >&-",
        "compress web1.raw >&-",
        "list >&-",
        "backup - --machine web1 <&-",
        "compress <&- >out",
    ] {
        let (code, text) = run(line);
        assert!(code == "2" && text.contains("is closed"), "{line}: {code}: {text}");
    }
    assert_eq!(rig.snapshot_count(), 0);
    // /dev/null is permitted, and so is a closed stream that is not used.
    for line in ["version >/dev/null", "version <&-", "version 2>&-"] {
        assert_eq!(run(line).0, "0", "{line}");
    }
}

/// A temporary image has no name: nothing is left when the program is killed.
#[test]
fn a_killed_import_leaves_nothing_in_the_temporary_folder() {
    let rig = Rig::new();
    rig.write("web1.raw", &noise(2 * MIB, 6));
    rig.ok(&["backup", "web1.raw", "--machine", "web1"]);
    // An image does not describe its machine.
    rig.code(3, &["export", "web1", "web1.ova"]);
    std::fs::create_dir_all(rig.path("inside")).unwrap();
    std::fs::create_dir(rig.path("tmp")).unwrap();
    let (inside, archive) = (rig.path("inside"), rig.path("web1.ova"));
    system("tar", &["xf", text(&archive), "-C", text(&inside)]).unwrap();
    // A VMDK that is no stream must be stored before it can be read.
    let image = rig
        .names("inside")
        .into_iter()
        .find(|name| name.contains(".vmdk"))
        .unwrap();
    std::fs::remove_file(inside.join(&image)).unwrap();
    rig.ok(&["image", "convert", "web1.raw", &format!("inside/{image}")]);
    let descriptor = rig
        .names("inside")
        .into_iter()
        .find(|name| name.contains(".ovf"))
        .unwrap();
    let other = rig.path("other.ova");
    system("tar", &["cf", text(&other), "-C", text(&inside), &descriptor, &image]).unwrap();
    let bytes = rig.read("other.ova");
    let clock = SystemClock::new();
    let mut command = rig.command(&["import", "-", "--to", "out"]);
    let command = command.env("TMPDIR", rig.path("tmp")).stdin(Stdio::piped());
    let mut child = command.stderr(Stdio::null()).spawn().unwrap();
    let mut input = child.stdin.take().unwrap();
    input.write_all(&bytes[..bytes.len() - MIB]).unwrap();
    let temporary = rig.path("tmp").display().to_string();
    let files = format!("/proc/{}/fd", child.id());
    let is_stored = || {
        let links = std::fs::read_dir(&files).unwrap().flatten();
        let mut links = links.filter_map(|entry| std::fs::read_link(entry.path()).ok());
        links.any(|link| link.display().to_string().starts_with(&temporary))
    };
    while !is_stored() {
        assert_runs(&mut child);
        clock.sleep(Duration::from_millis(2));
    }
    assert!(rig.names("tmp").is_empty(), "the temporary image has a name");
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(rig.names("tmp").is_empty());
    // Without a kill, the whole image is imported.
    let output = rig.run_with(&["import", "-", "--to", "out", "--format", "raw"], &bytes);
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(rig.read("out/sda.raw") == rig.read("web1.raw"));
}

#[test]
fn an_interrupted_conversion_leaves_nothing() {
    let rig = Rig::empty();
    rig.write("disk.raw", &noise(64 * MIB, 1));
    for target in ["new.qcow2", "new.raw"] {
        let begun = || has_partial(&rig);
        let words = ["image", "convert", "disk.raw", target, "--verify"];
        let output = interrupt(&rig, &words, begun, || remove(&rig, target));
        assert!(stderr(&output).contains("interrupted"), "{}", stderr(&output));
        assert_eq!(rig.names("."), ["disk.raw"], "{target}");
        if target == "new.qcow2" {
            let words = [&words[..], &["--data-file", "new.data"]].concat();
            interrupt(&rig, &words, begun, || {
                remove(&rig, target);
                remove(&rig, "new.data");
            });
            assert_eq!(rig.names("."), ["disk.raw"]);
        }
    }
    // A killed program cannot clean up: the next one removes the image, its data file and its folder, with a message.
    for words in [&["new.qcow2", "--data-file", "new.data"][..], &["new.hdd"]] {
        let words = [&["image", "convert", "disk.raw"], words].concat();
        kill_when_begun(&rig, &words);
        let left = rig.names(".");
        assert!(
            left.len() > 1 && left.iter().all(|name| name == "disk.raw" || name.ends_with(".partial")),
            "{left:?}"
        );
        let message = stderr(&rig.code(0, &words));
        assert_eq!(
            message.matches("a killed program had left").count(),
            left.len() - 1,
            "{message}"
        );
        assert!(!has_partial(&rig));
        for name in ["new.qcow2", "new.data"] {
            std::fs::remove_file(rig.path(name)).ok();
        }
        std::fs::remove_dir_all(rig.path("new.hdd")).ok();
    }
    rig.ok(&["image", "convert", "disk.raw", "new.qcow2"]);
}

/// Kills the program as soon as it has begun to write.
fn kill_when_begun(rig: &Rig, words: &[&str]) {
    let clock = SystemClock::new();
    let mut child = rig
        .command(words)
        .stderr(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    while !has_partial(rig) {
        assert_runs(&mut child);
        clock.sleep(Duration::from_micros(200));
    }
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn an_interrupted_restore_leaves_no_file_and_names_its_target() {
    let rig = Rig::new();
    rig.write("web1.raw", &noise(96 * MIB, 2));
    rig.ok(&["backup", "web1.raw"]);
    for target in ["out.raw", "out.qcow2"] {
        let words = ["restore", "web1", target, "--json"];
        let output = interrupt(&rig, &words, || has_partial(&rig), || remove(&rig, target));
        let document = document_of(&stdout(&output));
        assert_eq!(document["exit_code"], 130, "the code in docs/exit-codes.md");
        assert_eq!(document["error"]["kind"], "interrupted");
        assert_eq!(rig.names("."), ["repo", "web1.raw"]);
    }
    let begin = || rig.write("out.raw", &vec![0; 96 * MIB]);
    begin();
    let begun = || {
        let mut byte = [0];
        let file = std::fs::File::open(rig.path("out.raw")).unwrap();
        std::os::unix::fs::FileExt::read_exact_at(&file, &mut byte, 4 << 20).unwrap();
        byte != [0]
    };
    let output = interrupt(&rig, &["restore", "web1", "out.raw", "--in-place"], begun, begin);
    assert!(stderr(&output).contains("restore again"), "{}", stderr(&output));
    rig.ok(&["restore", "web1", "out.raw", "--in-place"]);
    assert!(rig.read("out.raw") == rig.read("web1.raw"));
}

/// A repository with several snapshots, and unreferenced packs.
fn rig_with_garbage(snapshots: u64) -> (Rig, Vec<u8>) {
    let rig = Rig::new();
    let mut bytes = noise(6 * MIB, 4);
    for number in 0..snapshots {
        bytes[..MIB].copy_from_slice(&noise(MIB, 1000 + number));
        rig.write("web1.raw", &bytes);
        rig.ok(&["backup", "web1.raw"]);
    }
    rig.ok(&["prune", "--keep-last", "1"]);
    (rig, bytes)
}

/// Each attempt needs a new rig, because a complete gc leaves nothing to do.
#[test]
fn gc_can_be_interrupted_and_repeated() {
    let clock = SystemClock::new();
    for _ in 0..ATTEMPTS {
        let (rig, bytes) = rig_with_garbage(12);
        let mut child = rig.command(&["gc", "--json"]).spawn().unwrap();
        let announced = || rig.path("repo/writers").exists() && !rig.names("repo/writers").is_empty();
        // Before that, the program may not handle signals yet.
        while !announced() && child.try_wait().unwrap().is_none() {
            clock.sleep(Duration::from_micros(100));
        }
        if child.try_wait().unwrap().is_none() {
            kill_process(Pid::from_child(&child), Signal::INT).ok();
        }
        let output = child.wait_with_output().unwrap();
        let document = document_of(&stdout(&output));
        rig.ok(&["verify"]);
        let report = rig.report(&["gc"]);
        assert_eq!(report["done"]["waiting_for"].as_array().unwrap().len(), 0, "{report}");
        rig.ok(&["verify"]);
        rig.ok(&["restore", "web1", "out.raw"]);
        assert!(rig.read("out.raw") == bytes);
        if output.status.signal() == Some(2) {
            assert_eq!(
                (&document["exit_code"], &document["error"]["kind"]),
                (&130.into(), &"interrupted".into())
            );
            return;
        }
    }
    panic!("gc always ended before the signal");
}

#[test]
fn an_interrupted_backup_commits_nothing() {
    let rig = Rig::new();
    rig.write("web1.raw", &noise(96 * MIB, 3));
    let begun = || rig.path("repo/writers").exists() && !rig.names("repo/writers").is_empty();
    let machine = std::cell::Cell::new(0);
    interrupt(&rig, &["backup", "web1.raw"], begun, || {
        // A second backup of the same data would end at once.
        machine.set(machine.get() + 1);
        rig.write("web1.raw", &noise(96 * MIB, 100 + machine.get()));
    });
    assert_eq!(rig.names("repo/writers"), [""; 0], "the announcement was removed");
    let before = rig.snapshot_count();
    rig.ok(&["backup", "web1.raw"]);
    assert_eq!(rig.snapshot_count(), before + 1);
    rig.ok(&["verify"]);
    rig.ok(&["gc"]);
    rig.ok(&["restore", "web1", "out.raw"]);
    assert!(rig.read("out.raw") == rig.read("web1.raw"));
}
