//! Hooks: when they are called, with which variables, and that they cannot harm a machine.

use std::os::unix::fs::PermissionsExt as _;
use std::sync::mpsc::Receiver;
use std::time::Duration;

use holdfast_block::Clock as _;
use serde_json::Value;

use super::bare::{AGENT, Bare, play_agent};

/// A machine with an agent, and a hook that logs its events.
struct Hooked {
    bare: Bare,
    agent_commands: Receiver<String>,
}

impl Hooked {
    /// `does` is a shell command that the hook runs besides logging.
    fn new(does: &str) -> Self {
        let bare = Bare::new(&[&AGENT[..], &["-uuid", "11111111-1111-4111-8111-111111111111"]].concat());
        let agent_commands = play_agent(&bare.lab.path("agent"));
        let log = bare.rig.path("log").display().to_string();
        let script = format!("#!/bin/sh\necho \"$1\" >> {log}\nenv | grep ^HOLDFAST_ | sort > {log}.$1\n{does}\n");
        bare.rig.write_program("hook", &script);
        Self { bare, agent_commands }
    }

    /// A command line that backs the machine up.
    fn words<'a>(&'a self, words: &[&'a str]) -> Vec<&'a str> {
        [&["backup", &self.bare.source, "--hook", "hook"], words].concat()
    }

    /// The events for which the hook was called.
    fn called(&self) -> Vec<String> {
        let text = String::from_utf8(self.bare.rig.read("log")).unwrap();
        text.lines().map(str::to_owned).collect()
    }

    /// Waits until the hook was called for `event`.
    fn wait_for(&self, event: &str) {
        for _ in 0..400 {
            if self.bare.rig.path("log").exists() && self.called().iter().any(|called| called == event) {
                return;
            }
            self.bare.lab.clock.sleep(Duration::from_millis(50));
        }
        panic!("the hook was not called for {event}: {:?}", self.called());
    }

    fn variable(&self, event: &str, name: &str) -> String {
        let text = String::from_utf8(self.bare.rig.read(&format!("log.{event}"))).unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix(&format!("{name}=")));
        line.unwrap_or_else(|| panic!("{event} has no {name}: {text}"))
            .to_owned()
    }

    /// The commands that the guest agent received.
    fn agent_commands(&self) -> Vec<String> {
        self.agent_commands.try_iter().collect()
    }
}

const WELL: [&str; 4] = ["job-start", "pre-freeze", "post-thaw", "job-end"];
const BADLY: [&str; 4] = ["job-start", "pre-freeze", "post-thaw", "job-abort"];

#[test]
fn hooks_are_called_in_order_with_their_variables() {
    let hooked = Hooked::new("echo saying $1");
    let document = hooked.bare.rig.json(0, &hooked.words(&[]));
    assert_eq!(hooked.called(), WELL);
    let snapshot = &document["report"]["machines"][0]["snapshot"];
    assert_eq!(
        hooked.variable("job-end", "HOLDFAST_SNAPSHOT"),
        snapshot["id"].as_str().unwrap()
    );
    assert_eq!(hooked.variable("job-end", "HOLDFAST_CONSISTENCY"), "file system");
    assert_eq!(hooked.variable("job-start", "HOLDFAST_MACHINE"), "web1");
    assert_eq!(hooked.variable("job-start", "HOLDFAST_HYPERVISOR"), hooked.bare.source);
    assert_eq!(hooked.variable("pre-freeze", "HOLDFAST_MACHINE_STATE"), "running");
    assert_eq!(hooked.variable("pre-freeze", "HOLDFAST_MACHINE_UUID").len(), 36);
    hooked
        .variable("post-thaw", "HOLDFAST_FROZEN_MS")
        .parse::<u64>()
        .unwrap();
    hooked
        .variable("post-thaw", "HOLDFAST_PAUSED_MS")
        .parse::<u64>()
        .unwrap();
    assert_eq!(
        hooked.agent_commands(),
        ["guest-fsfreeze-freeze", "guest-fsfreeze-thaw"]
    );
    // The output of hooks is logged with the name of the hook; hooks do not get the password.
    let with_password = |words: &[&str]| {
        let mut command = hooked.bare.rig.command(words);
        let output = command
            .env("HOLDFAST_PASSWORD", "four horses eat soup")
            .env("HOLDFAST_TO_PASSWORD", "soup of another repository")
            .env("HOLDFAST_POOL_PASSWORD", "soup of a pool")
            .output()
            .unwrap();
        assert!(output.status.success(), "{output:?}");
        output
    };
    with_password(&["init", "-r", "sealed"]);
    let output = with_password(&hooked.words(&["-r", "sealed", "--no-progress"]));
    let message = String::from_utf8(output.stderr).unwrap();
    assert!(message.contains("hook post-thaw: saying post-thaw"), "{message}");
    let text = String::from_utf8(hooked.bare.rig.read("log.job-start")).unwrap();
    assert!(!text.contains("soup") && !text.contains("PASSWORD"), "{text}");
}

/// A user who could change a hook of root could run commands as root.
#[test]
fn a_hook_that_others_can_write_is_not_called() {
    let hooked = Hooked::new("");
    std::fs::set_permissions(hooked.bare.rig.path("hook"), std::fs::Permissions::from_mode(0o777)).unwrap();
    let (_, text) = hooked.bare.rig.error(1, &hooked.words(&[]));
    assert!(text.contains("it is not called: other users can write it"), "{text}");
    assert!(!hooked.bare.rig.path("log").exists());
    hooked.bare.wait_until_clean("refused");
}

/// A file that a QEMU of another user names is opened with that user's rights, not with root's.
#[test]
fn images_are_opened_with_the_rights_of_the_user_of_qemu() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    // The option of older QEMUs was removed in 10.0.
    let words = match holdfast_test_kit::run("qemu-system-x86_64", &["--help"]) {
        help if help
            .lines()
            .any(|line| line.starts_with("-run-with") && line.contains("user=")) =>
        {
            ["-run-with", "user=nobody"]
        }
        _ => ["-runas", "nobody"],
    };
    let bare = Bare::new(&words);
    let own = std::os::unix::fs::PermissionsExt::from_mode(0o600);
    std::fs::set_permissions(bare.lab.path("disk0"), own).unwrap();
    let words = ["backup", &bare.source, "--method", "pause"];
    let (_, text) = bare.rig.error(1, &words);
    assert!(text.contains("Permission denied"), "{text}");
    assert_eq!(bare.rig.snapshot_count(), 0);
    bare.wait_until_clean("refused");
    // QEMU itself has the images open, and passes on their file descriptors.
    bare.rig.ok(&["backup", &bare.source]);
    assert_eq!(bare.rig.snapshot_count(), 1);
}

#[test]
fn a_hook_that_fails_before_the_point_in_time_stops_the_backup_or_warns() {
    let hooked = Hooked::new("[ $1 != pre-freeze ] || exit 7");
    let (kind, text) = hooked.bare.rig.error(1, &hooked.words(&[]));
    assert!(kind == "refused" && text.contains("code 7"), "{text}");
    assert_eq!(hooked.called(), BADLY);
    assert!(hooked.variable("job-abort", "HOLDFAST_ERROR").contains("code 7"));
    assert!(hooked.agent_commands().is_empty());
    assert_eq!(hooked.bare.rig.snapshot_count(), 0);
    hooked.bare.wait_until_clean("refused");

    let words = hooked.words(&["--hook-failure", "warn"]);
    let output = hooked.bare.rig.run(&[&words[..], &["--json"]].concat());
    let document: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(document["status"], "warnings", "{document}");
    assert_eq!(hooked.called()[4..], WELL);
}

#[test]
fn a_hook_that_fails_after_the_point_in_time_only_warns_and_a_folder_has_several() {
    let hooked = Hooked::new("[ $1 = job-start ] || [ $1 = pre-freeze ] || exit 1");
    let folder = hooked.bare.rig.path("hooks.d");
    std::fs::create_dir(&folder).unwrap();
    std::os::unix::fs::symlink(hooked.bare.rig.path("hook"), folder.join("10")).unwrap();
    std::os::unix::fs::symlink(hooked.bare.rig.path("hook"), folder.join("20")).unwrap();
    let output = hooked
        .bare
        .rig
        .run(&["backup", &hooked.bare.source, "--hook-folder", "hooks.d", "--json"]);
    let document: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(
        (&document["status"], document["warnings"].as_array().unwrap().len()),
        (&"warnings".into(), 4)
    );
    assert_eq!(hooked.called(), WELL.map(|event| [event; 2]).concat());
    let (_, text) = hooked
        .bare
        .rig
        .error(1, &["backup", &hooked.bare.source, "--hook-folder", "nowhere"]);
    assert!(text.contains("nowhere"), "{text}");
    let (_, text) = hooked.bare.rig.error(2, &["backup", "./image", "--hook", "hook"]);
    assert!(text.contains("--hook"), "{text}");
}

#[test]
fn a_hook_that_hangs_is_killed_and_the_machine_was_never_frozen() {
    let hooked = Hooked::new("[ $1 != pre-freeze ] || sleep 100");
    let (_, text) = hooked.bare.rig.error(1, &hooked.words(&["--hook-timeout", "1"]));
    assert!(text.contains("exceeded its time limit"), "{text}");
    assert_eq!(hooked.called(), BADLY);
    assert!(hooked.agent_commands().is_empty());
    hooked.bare.wait_until_clean("hanging");
}

/// A hook that was called before the freeze is also called at the end, even if the backup was killed.
#[test]
fn hooks_are_called_with_job_abort_after_a_backup_is_killed() {
    for event in ["pre-freeze", "post-thaw"] {
        let hooked = Hooked::new(&format!(
            "[ $1 != {event} ] || [ -e killed ] || {{ echo > killed; kill -9 $PPID; }}"
        ));
        let output = hooked.bare.rig.run(&hooked.words(&[]));
        assert!(output.status.code().is_none(), "{event}: {output:?}");
        hooked.wait_for("job-abort");
        hooked.bare.wait_until_clean(event);
        let called = hooked.called();
        assert_eq!(called.last().unwrap(), "job-abort", "{event}: {called:?}");
        assert!(called.contains(&"post-thaw".to_owned()), "{event}: {called:?}");
        assert_eq!(hooked.variable("job-abort", "HOLDFAST_ERROR"), "the backup was killed");
        assert_eq!(hooked.variable("job-abort", "HOLDFAST_MACHINE"), "web1");
        let agent_commands = hooked.agent_commands();
        let count = |what: &str| agent_commands.iter().filter(|command| command.ends_with(what)).count();
        assert!(count("thaw") >= count("freeze"), "{event}: {agent_commands:?}");
    }
}

#[test]
fn every_variable_is_documented() {
    let text = include_str!("../../../../../docs/machines.md");
    for (name, _) in holdfast_engine::HOOK_VARIABLES {
        assert!(
            text.contains(&format!("`{name}`")),
            "docs/machines.md has nothing about {name}"
        );
    }
}

/// A backup can be stopped while a hook hangs. The hook is killed.
#[test]
fn a_backup_is_stopped_while_a_hook_hangs() {
    let hooked = Hooked::new("if [ \"$1\" = pre-freeze ]; then exec sleep 600; fi");
    let words = hooked.words(&["--hook-timeout", "600"]);
    let mut child = hooked.bare.rig.command(&words).spawn().unwrap();
    hooked.wait_for("pre-freeze");
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    let clock = &hooked.bare.lab.clock;
    let start = clock.now();
    while child.try_wait().unwrap().is_none() {
        assert!(
            clock.now().saturating_sub(start) < Duration::from_secs(60),
            "the backup does not stop"
        );
        clock.sleep(Duration::from_millis(20));
    }
    assert_eq!(hooked.called(), ["job-start", "pre-freeze", "post-thaw", "job-abort"]);
}
