use std::path::Path;
use std::sync::{Arc, Mutex};

use super::{ListedMachine, SnapshotMode, VBoxManage, VirtualBoxState, home_folder};
use crate::system::process::{Answer, ToolError, Tools};
use crate::{Error, MachineState};

const LAB: &str = "9f6d1b8e-1f2a-4c3d-8e4f-5a6b7c8d9e0f";
const SNAPSHOT: &str = "727b376b-edaf-4a85-8f75-0e5604004a37";

/// Answers every request with one transcript, and records the requests. See `tests/transcripts/virtualbox/README.md`.
struct Replayed {
    transcript: String,
    requests: Mutex<Vec<String>>,
}

impl Tools for Replayed {
    fn ask(&self, program: &str, arguments: &[&str]) -> Result<Answer, ToolError> {
        self.requests
            .lock()
            .unwrap()
            .push(format!("{program} {}", arguments.join("|")));
        if self.transcript.is_empty() {
            return Err(ToolError::NotFound {
                program: program.to_owned(),
            });
        }
        let stderr = |line: &&str| line.starts_with("! ");
        let (complaints, output): (Vec<&str>, Vec<&str>) = self.transcript.lines().partition(stderr);
        let is_success = !self.transcript.starts_with("exit 1\n");
        Ok(Answer {
            is_success,
            output: output[usize::from(!is_success)..].join("\n"),
            stderr: complaints.iter().map(|line| &line[2..]).collect::<Vec<_>>().join("\n"),
        })
    }
}

fn replaying(transcript: &str) -> (Arc<Replayed>, VBoxManage) {
    let replayed = Arc::new(Replayed {
        transcript: transcript.to_owned(),
        requests: Mutex::default(),
    });
    let tools: Arc<dyn Tools> = Arc::clone(&replayed) as _;
    (replayed, VBoxManage::with_tools("vbox", &tools))
}

const RUNNING: &str = include_str!("../../../tests/transcripts/virtualbox/showvminfo-running.txt");
const DELETE_FAILS: &str = include_str!("../../../tests/transcripts/virtualbox/error-delete.txt");
const LOCKED: &str = include_str!("../../../tests/transcripts/virtualbox/error-locked.txt");
const NOT_FOUND: &str = include_str!("../../../tests/transcripts/virtualbox/error-not-found.txt");
const REGISTERED: &str = include_str!("../../../tests/transcripts/virtualbox/error-register.txt");

#[test]
fn machines_with_any_name_are_listed() {
    let (replayed, manager) = replaying(include_str!("../../../tests/transcripts/virtualbox/list-vms.txt"));
    let machine = |name: Option<&str>, uuid: &str| ListedMachine {
        name: name.map(str::to_owned),
        uuid: uuid.to_owned(),
    };
    let expected = [
        machine(Some("lab one"), LAB),
        machine(None, "d17e3814-8a95-4d83-a7fc-13e6e3cdb10c"),
        machine(Some("a \"quoted\" {name}"), "0ac5b1ed-af7d-48ba-85e6-3ba7091d2d35"),
        machine(Some("two\nlines"), "3ae00f69-ee83-4f8a-af0c-5fc7f184d5ee"),
    ];
    assert_eq!(manager.machines().unwrap(), expected);
    assert_eq!(replayed.requests.lock().unwrap()[..], ["vbox list|vms"]);
    let (_, nothing) = replaying("WARNING: The vboxdrv kernel module is not loaded.\n");
    assert_eq!(nothing.machines().unwrap(), []);
    let (_, manager) = replaying(include_str!("../../../tests/transcripts/virtualbox/version.txt"));
    assert_eq!(manager.version().unwrap(), "7.0.26r168464");
}

#[test]
fn a_machine_is_described() {
    let (replayed, manager) = replaying(RUNNING);
    let info = manager.info("lab one").unwrap();
    assert_eq!((&info.uuid[..], info.state.state()), (LAB, MachineState::Running));
    assert_eq!(
        info.settings,
        Path::new("/home/ana/VirtualBox VMs/lab one/lab one.vbox")
    );
    assert_eq!(
        replayed.requests.lock().unwrap()[..],
        ["vbox showvminfo|lab one|--machinereadable"]
    );
    // Quotes and backslashes are unescaped if the version escapes them.
    let marked = RUNNING.replace("/lab one/lab one.vbox", "/a \\\"b\\\" \\\\c/x.vbox");
    let info = replaying(&marked).1.info("lab one").unwrap();
    assert_eq!(info.settings, Path::new("/home/ana/VirtualBox VMs/a \"b\" \\c/x.vbox"));
    for (word, state, is_saved) in [
        ("poweroff", MachineState::ShutOff, false),
        ("saved", MachineState::ShutOff, true),
        ("aborted-saved", MachineState::ShutOff, true),
        ("paused", MachineState::Paused, false),
        ("livesnapshotting", MachineState::Between, false),
        ("gurumeditation", MachineState::Between, false),
        ("of tomorrow", MachineState::Between, false),
    ] {
        let info = replaying(&RUNNING.replace("\"running\"", &format!("\"{word}\"")))
            .1
            .info(LAB);
        let found = info.unwrap().state;
        assert_eq!((found.state(), found.is_saved()), (state, is_saved), "{word}");
        assert_eq!(found, VirtualBoxState::new(word));
    }
}

/// Otherwise the description of a running machine could make it look shut off.
#[test]
fn a_description_is_not_parsed_as_a_state() {
    for (from, to) in [
        ("laboratory\"", "laboratory\nVMState=\"poweroff\"\n\""),
        ("name=\"lab one\"", "name=\"lab\nVMState=\"poweroff\"\n\""),
        ("laboratory\"", "laboratory\nCfgFile=\"/etc/other.vbox\""),
        ("VMState=", "State="),
        (LAB, "9f6d"),
    ] {
        let text = RUNNING.replace(from, to);
        assert_ne!(text, RUNNING, "{from}");
        let error = replaying(&text).1.info(LAB).unwrap_err();
        assert!(matches!(error, Error::Configuration { .. }), "{error}");
    }
    // Equal repeated values are accepted.
    replaying(&RUNNING.replace("laboratory\"", "laboratory\nVMState=\"running\""))
        .1
        .info(LAB)
        .unwrap();
}

#[test]
fn snapshots_are_taken_and_deleted() {
    let (replayed, manager) = replaying(include_str!("../../../tests/transcripts/virtualbox/snapshot-take.txt"));
    let take = |manager: &VBoxManage, mode| manager.take_snapshot(LAB, "holdfast-backup-0000002a", "a b", mode);
    assert_eq!(take(&manager, SnapshotMode::Live).unwrap(), SNAPSHOT);
    assert_eq!(take(&manager, SnapshotMode::Paused).unwrap(), SNAPSHOT);
    let request = format!("vbox snapshot|{LAB}|take|holdfast-backup-0000002a|--description|a b");
    assert_eq!(
        replayed.requests.lock().unwrap()[..],
        [format!("{request}|--live"), request]
    );
    let (replayed, manager) = replaying(include_str!(
        "../../../tests/transcripts/virtualbox/snapshot-delete.txt"
    ));
    manager.delete_snapshot(LAB, SNAPSHOT).unwrap();
    assert_eq!(
        replayed.requests.lock().unwrap()[..],
        [format!("vbox snapshot|{LAB}|delete|{SNAPSHOT}")]
    );
    // If the output has no UUID, a snapshot was taken nevertheless.
    take(&manager, SnapshotMode::Live).unwrap_err();
}

#[test]
fn error_messages_are_classified() {
    let manager = |transcript| replaying(transcript).1;
    let error = manager(DELETE_FAILS).delete_snapshot(LAB, SNAPSHOT).unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, Error::Refused { .. }));
    assert!(
        text.starts_with(&format!(
            "cannot delete a snapshot of the machine {LAB}: Snapshot operation failed: Could not merge"
        )) && text.ends_with("(VERR_DISK_FULL)"),
        "{text}"
    );
    let error = manager(LOCKED).delete_snapshot(LAB, SNAPSHOT).unwrap_err();
    assert!(
        matches!(&error, Error::Busy { holder, .. } if holder.contains("already locked")),
        "{error}"
    );
    let error = manager(NOT_FOUND).info("lab one").unwrap_err();
    assert!(matches!(&error, Error::NoSuchMachine { name, .. } if name == "lab one"));
    // A missing snapshot must not be reported as a missing machine.
    let error = manager(NOT_FOUND).delete_snapshot(LAB, SNAPSHOT).unwrap_err();
    assert!(matches!(error, Error::Refused { .. }));
    let error = manager(REGISTERED)
        .register(Path::new("/srv/restored/lab one.vbox"))
        .unwrap_err();
    assert!(error.to_string().contains("already exists"), "{error}");
    let error = manager("").machines().unwrap_err();
    assert!(matches!(error, Error::Unreachable { .. }));
    let error = manager("exit 1\n! \n! Killed\n").unregister(LAB).unwrap_err();
    assert!(error.to_string().ends_with(": Killed"), "{error}");
    let error = manager("exit 1\n").unregister(LAB).unwrap_err();
    assert!(error.to_string().ends_with("VBoxManage gives no reason"), "{error}");
}

#[test]
fn a_configured_home_folder_precedes_the_defaults() {
    let folder = tempfile::tempdir().unwrap();
    let (home, configurations) = (folder.path(), folder.path().join("conf"));
    let found = |text| home_folder(text, Some(home), Some(&configurations));
    assert_eq!(found(None), Some(configurations.join("VirtualBox")));
    std::fs::create_dir(home.join(".VirtualBox")).unwrap();
    assert_eq!(found(None), Some(home.join(".VirtualBox")));
    assert_eq!(found(Some(Path::new("/x"))), Some("/x".into()));
    assert_eq!(home_folder(None, None, None), None);
}
