//! Snapshots with memory, and the helper of mount(8). runc and CRIU are stand-ins here, which record their calls:
//! `scripts/test-criu` runs the real ones.

use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::host::text;
use crate::program::{stderr, stdout};
use crate::rig::Rig;

use super::mounts::wait_for;

/// Answers like runc 1.1, and writes its calls to `calls`. The state of the container is in `status`. Files change its
/// answers: with `broken` checkpoints and restores fail, with `slow` a checkpoint takes until the file is deleted, and
/// with `stuck` it neither resumes nor tells the state of a paused container.
const RUNC: &str = r#"#!/bin/sh
folder=$(dirname "$0")
while [ "${1#--}" != "$1" ]; do
  case $1 in --version) echo "runc version 1.1.5"; exit 0 ;; --root | --criu | --log) shift 2 ;; *) exit 3 ;; esac
done
verb=$1
images= work=
for word; do
  case $previous in --image-path) images=$word ;; --work-path) work=$word ;; esac
  previous=$word
done
[ "$verb" = state ] || echo "$verb" >> "$folder/calls"
status=$(cat "$folder/status")
case $verb in
  state)
    [ ! -e "$folder/stuck" ] || [ "$status" != paused ] || { echo 'level=error msg="cannot read the freezer"' >&2; exit 1; }
    [ "$status" != none ] || { echo 'level=error msg="container does not exist"' >&2; exit 1; }
    printf '{"status": "%s", "bundle": "%s/bundle", "rootfs": "%s"}' "$status" "$folder" "$(cat "$folder/rootfs")" ;;
  pause) echo paused > "$folder/status" ;;
  resume)
    [ ! -e "$folder/stuck" ] || { echo 'level=error msg="cannot thaw"' >&2; exit 1; }
    echo running > "$folder/status" ;;
  delete) echo none > "$folder/status" ;;
  checkpoint)
    if [ -e "$folder/broken" ]; then
      printf '(0.1) Error (criu/files-reg.c:1): Cannot lookup mount\n(0.2) Error (criu/cr-dump.c:2): Dumping FAILED.\n' > "$work/dump.log"
      exit 1
    fi
    while [ -e "$folder/slow" ]; do sleep 0.05; done
    : > "$images/inventory.img"
    echo pages > "$images/pages-1.img" ;;
  restore)
    [ -e "$images/pages-1.img" ] || exit 4
    if [ -e "$folder/used" ]; then
      rm "$folder/used"
      printf '(0.1) Error (criu/cr-restore.c:1): Cannot fork for 1: File exists\n' > "$work/restore.log"
      exit 1
    fi
    if [ -e "$folder/broken" ]; then
      printf '(0.1) Error (criu/mount.c:1): mnt: No such mount\n' > "$work/restore.log"
      exit 1
    fi
    echo running > "$folder/status" ;;
esac
"#;

const CRIU: &str = "#!/bin/sh\n[ \"$1\" = check ] || echo 'Version: 4.1.1'\n";

/// A container with stand-ins for runc and CRIU.
struct World {
    rig: Rig,
}

impl World {
    fn new(create: &[&str]) -> Self {
        let rig = Rig::empty();
        rig.ok(create);
        std::fs::create_dir_all(rig.path("programs/bundle")).unwrap();
        let world = Self { rig };
        world.set("bundle/config.json", "{}");
        world.set("status", "running");
        world.set("rootfs", "/nowhere");
        world.program("runc", RUNC);
        world.program("criu", CRIU);
        world
    }

    fn set(&self, name: &str, content: &str) {
        self.rig.write(&format!("programs/{name}"), content.as_bytes());
    }

    fn program(&self, name: &str, script: &str) {
        self.rig.write_program(&format!("programs/{name}"), script);
    }

    fn words(words: &[&str]) -> Vec<String> {
        // From the folder of the command: the worker has another one.
        let program = |name: &str| format!("programs/{name}");
        let mut all: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
        all.extend([
            "--runc-program".to_owned(),
            program("runc"),
            "--criu".to_owned(),
            program("criu"),
        ]);
        all
    }

    fn report(&self, words: &[&str]) -> Value {
        let words = Self::words(words);
        self.rig.report(&words.iter().map(String::as_str).collect::<Vec<_>>())
    }

    /// The error and the hint.
    fn refused(&self, words: &[&str]) -> String {
        let words = Self::words(words);
        let output = self.rig.run(&words.iter().map(String::as_str).collect::<Vec<_>>());
        assert!(!output.status.success(), "{}", stdout(&output));
        stderr(&output)
    }

    fn take_calls(&self) -> String {
        let path = self.rig.path("programs/calls");
        let calls = std::fs::read_to_string(&path).unwrap_or_default();
        std::fs::remove_file(path).ok();
        calls.lines().collect::<Vec<_>>().join(" ")
    }

    fn memory_folder_count(&self) -> usize {
        let names = self.rig.names("web1");
        names.iter().filter(|name| name.starts_with("memory-")).count()
    }
}

const SNAPSHOT: [&str; 6] = ["container", "snapshot", "web1", "one", "--runc", "web1"];

/// Each refusal says what is missing, and comes before the container is paused and before a file is made.
#[test]
fn what_cannot_store_memory_is_refused_before_anything_is_touched() {
    let world = World::new(&["container", "create", "web1", "64M", "--filesystem", "none"]);
    let before = world.rig.names("web1");
    let check = |expected: &str| {
        let error = world.refused(&SNAPSHOT);
        assert!(
            error.contains(expected) && error.contains("hint:"),
            "{expected}: {error}"
        );
        assert_eq!(world.take_calls(), "");
        assert_eq!(world.rig.names("web1"), before);
    };
    check("is not mounted");
    world.set("status", "paused");
    check("the container web1 of runc is paused");
    world.set("status", "none");
    check("runc knows no container web1");
    world.set("status", "running");
    world.program("criu", "#!/bin/sh\necho 'Version: 3.17.1'\n");
    check("is too old: it has \"Version: 3.17.1\", and version 4.1 or later is needed");
    world.program(
        "criu",
        "#!/bin/sh\n[ \"$1\" != check ] || { echo 'Error (criu/cr-check.c:7): no vdso' >&2; exit 1; }\necho 'Version: 4.2'\n",
    );
    check("CRIU cannot work on this host: Error (criu/cr-check.c:7): no vdso");
    world.program("criu", "#!/bin/sh\necho 'cannot parse vdso' >&2\nexit 1\n");
    check("does not start: cannot parse vdso");
    world.program("runc", "#!/bin/sh\necho 'crun version 1.8.1'\n");
    check("is not runc, but \"crun version 1.8.1\"");
    std::fs::remove_file(world.rig.path("programs/runc")).unwrap();
    check("there is no program");
}

/// pause, checkpoint, disk, resume; and back: delete what has ended, mount, restore.
#[test]
fn memory_and_disk_are_stored_while_the_container_is_paused() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let world = World::new(&["container", "create", "web1", "64M"]);
    std::fs::create_dir(world.rig.path("mnt")).unwrap();
    world.rig.ok(&["container", "mount", "web1", "mnt"]);
    let mounted = Mounted(&world.rig);

    let other = world.refused(&SNAPSHOT);
    assert!(other.contains("is not on the disk of"), "{other}");
    std::fs::create_dir(world.rig.path("mnt/rootfs")).unwrap();
    world.set("rootfs", text(&world.rig.path("mnt/rootfs").canonicalize().unwrap()));

    world.set("broken", "");
    let broken = world.refused(&SNAPSHOT);
    assert!(broken.contains("CRIU: Error (criu/files-reg.c:1): Cannot lookup mount (the whole log: "));
    assert!(world.rig.path("web1/memory-log/dump.log").exists());
    assert_eq!(
        (world.take_calls().as_str(), world.memory_folder_count()),
        ("pause checkpoint resume", 1)
    );
    std::fs::remove_file(world.rig.path("programs/broken")).unwrap();

    let taken = world.report(&SNAPSHOT);
    assert_eq!(taken["consistency"], "frozen");
    assert_eq!(taken["memory"]["bytes"], 8);
    assert_eq!(
        (world.take_calls().as_str(), world.memory_folder_count()),
        ("pause checkpoint resume", 1)
    );
    let listed = world.rig.report(&["container", "snapshots", "web1"]);
    assert_eq!(listed["snapshots"][0]["has_memory"], true);

    let resume = ["container", "resume", "web1"];
    assert!(world.refused(&resume).contains("is mounted"));
    world.rig.ok(&["container", "unmount", "web1"]);
    world.rig.ok(&["container", "switch", "web1", "one", "--discard"]);
    // A dry run once checked neither the programs nor whether the name is free.
    let dry_run = ["container", "resume", "web1", "--dry-run"];
    assert!(
        world
            .refused(&dry_run)
            .contains("the container web1 of runc is running")
    );
    world.set("status", "stopped");
    assert_eq!(world.report(&dry_run)["dry_run"], true);
    assert_eq!(world.take_calls(), "");
    world.set("broken", "");
    assert!(
        world
            .refused(&resume)
            .contains("CRIU: Error (criu/mount.c:1): mnt: No such mount")
    );
    std::fs::remove_file(world.rig.path("programs/broken")).unwrap();
    assert_eq!(world.take_calls(), "delete restore");
    // The failure has left the snapshot as it was, and a process number may be in use for a moment.
    world.set("used", "");
    let resumed = world.report(&resume);
    assert_eq!(resumed["snapshot"], "one");
    assert_eq!(world.take_calls(), "restore restore");
    assert!(world.rig.path("mnt/rootfs").exists());

    world.rig.ok(&["container", "delete", "web1", "one"]);
    assert_eq!(world.memory_folder_count(), 0);
    drop(mounted);
}

impl World {
    /// A mounted container with the root file system of the container of runc.
    fn mounted() -> Self {
        let world = Self::new(&["container", "create", "web1", "64M"]);
        std::fs::create_dir(world.rig.path("mnt")).unwrap();
        world.rig.ok(&["container", "mount", "web1", "mnt"]);
        std::fs::create_dir(world.rig.path("mnt/rootfs")).unwrap();
        world.set("rootfs", text(&world.rig.path("mnt/rootfs").canonicalize().unwrap()));
        world
    }

    fn status(&self) -> String {
        let status = std::fs::read_to_string(self.rig.path("programs/status")).unwrap();
        status.trim().to_owned()
    }
}

/// There is one pause at a time. If its process is killed, the server resumes the container when runc has ended too.
#[test]
fn a_container_runs_again_after_a_snapshot_was_killed() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let world = World::mounted();
    let mounted = Mounted(&world.rig);
    world.set("slow", "");
    let words = World::words(&SNAPSHOT);
    let mut first = world
        .rig
        .command(&words.iter().map(String::as_str).collect::<Vec<_>>())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    wait_for("the checkpoint has begun", || {
        std::fs::read_to_string(world.rig.path("programs/calls")).is_ok_and(|calls| calls.contains("checkpoint"))
    });
    let second = world.refused(&SNAPSHOT);
    assert!(second.contains("another snapshot with memory of"), "{second}");
    first.kill().unwrap();
    first.wait().unwrap();
    assert_eq!(world.status(), "paused");
    std::fs::remove_file(world.rig.path("programs/slow")).unwrap();
    wait_for("the container runs", || world.status() == "running");
    let listed = world.rig.report(&["container", "snapshots", "web1"]);
    assert_eq!(listed["snapshots"].as_array().unwrap().len(), 0);
    world.report(&SNAPSHOT);
    drop(mounted);
}

/// The note of a pause is kept until runc says that the container is not paused.
#[test]
fn a_container_whose_state_is_unknown_is_resumed_later() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let world = World::mounted();
    let mounted = Mounted(&world.rig);
    world.set("stuck", "");
    let error = world.refused(&SNAPSHOT);
    assert!(error.contains("runc resume web1: cannot thaw"), "{error}");
    let listed = world.rig.report(&["container", "snapshots", "web1"]);
    assert_eq!(listed["snapshots"][0]["has_memory"], true);
    assert_eq!(world.status(), "paused");
    std::fs::remove_file(world.rig.path("programs/stuck")).unwrap();
    wait_for("the container runs", || world.status() == "running");
    drop(mounted);
}

/// The configuration of the snapshot and the one that would be used are compared.
#[test]
fn a_resume_needs_the_configuration_and_the_disk_of_the_snapshot() {
    let world = World::new(&["container", "create", "web1", "64M", "--filesystem", "none"]);
    let error = world.refused(&["container", "resume", "web1"]);
    assert!(error.contains("is not at a snapshot with memory"), "{error}");
    world.rig.ok(&["container", "snapshot", "web1", "one"]);
    let error = world.refused(&["container", "resume", "web1"]);
    assert!(error.contains("is not at a snapshot with memory"), "{error}");
}

/// What a killed snapshot has left is deleted when the container is opened; other folders are not.
#[test]
fn memory_that_no_snapshot_lists_is_deleted() {
    let world = World::new(&["container", "create", "web1", "64M", "--filesystem", "none"]);
    let id = "9f6d1b8e-1f2a-4c3d-8e4f-5a6b7c8d9e0f";
    for name in [
        format!("memory-{id}"),
        format!("memory-{id}.partial"),
        "memory-mine".to_owned(),
    ] {
        std::fs::create_dir_all(world.rig.path(&format!("web1/{name}/images"))).unwrap();
    }
    world.rig.ok(&["container", "snapshot", "web1", "one"]);
    let names = world.rig.names("web1");
    let left: Vec<&String> = names.iter().filter(|name| name.starts_with("memory-")).collect();
    assert_eq!(left, ["memory-mine"]);
}

struct Mounted<'a>(&'a Rig);

impl Drop for Mounted<'_> {
    fn drop(&mut self) {
        self.0.run(&["container", "unmount", "web1"]);
    }
}

/// Calls the helper as mount(8) does. The program that it calls is a stand-in that prints its arguments.
#[expect(clippy::disallowed_methods, reason = "mount(8) starts the helper")]
fn help_to_mount(rig: &Rig, words: &[&str]) -> (Option<i32>, String) {
    let printer = rig.write_program("printer", "#!/bin/sh\necho \"$@\"\n");
    let helper = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/mount.holdfast");
    let output = Command::new(helper)
        .args(words)
        .env("HOLDFAST", printer)
        .output()
        .unwrap();
    (output.status.code(), stdout(&output) + &stderr(&output))
}

#[test]
fn the_helper_of_mount_translates_options() {
    let rig = Rig::empty();
    let calls = [
        (
            &["/c", "/m", "-o", "rw,nofail,x-systemd.automount"][..],
            "container mount -- /c /m",
        ),
        (
            &["/c", "/m", "-o", "ro,snapshot=one"],
            "container mount --snapshot one -- /c /m",
        ),
        (
            &["/c", "/m", "-n", "-v", "-o", "disk,allow_other"],
            "container mount --disk --allow-other -- /c /m",
        ),
        (
            &["/c", "/m", "-o", "through=nbd"],
            "container mount --through nbd -- /c /m",
        ),
        (
            &["/c", "/m", "-o", "auto,nouser,nousers,noowner,nogroup"],
            "container mount -- /c /m",
        ),
        (
            &["/c", "/m", "-o", "users,owner,exec,suid,dev"],
            "container mount -- /c /m",
        ),
        (&["/c", "/m", "-s", "-o", "bogus"], "container mount -- /c /m"),
        (&["/c", "/m", "-f", "-o", "rw", "-t", "holdfast"], ""),
    ];
    for (words, expected) in calls {
        let (code, said) = help_to_mount(&rig, words);
        assert_eq!(
            (code, said.trim().trim_start_matches("--quiet ")),
            (Some(0), expected),
            "{words:?}"
        );
    }
    let refusals = [
        (&["/c"][..], "usage: mount.holdfast"),
        (&["/c", "/m", "-o", "bogus"], "the option bogus is not known"),
        (&["/c", "/m", "-o", "lazytime"], "the option lazytime is not supported"),
        (
            &["/c", "/m", "-o", "ro"],
            "the option snapshot=NAME mounts a snapshot read-only",
        ),
        (&["/c", "/m", "-N", "/proc/1/ns/mnt"], "nsenter --mount"),
    ];
    for (words, expected) in refusals {
        let (code, said) = help_to_mount(&rig, words);
        assert!(code == Some(1) && said.contains(expected), "{words:?}: {said}");
    }
}
