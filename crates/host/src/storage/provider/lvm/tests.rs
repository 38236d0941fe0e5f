//! Tests of the arguments for LVM, and of the parsing of its answers. A fake program returns answers about real
//! volumes.

mod metadata;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use holdfast_block::SystemClock;

use super::super::{HostSnapshot, HostSnapshotLabel, HostSnapshotName, HostSnapshotScope, Provider, ProviderError};
use super::{Lvm, dataset};
use crate::system::process::{Answer, ToolError, Tools};

/// The volumes of a group, as LVM 2.03.16 reported them.
const VOLUMES: &str = include_str!("fixtures/lvs.json");
const LABEL: HostSnapshotLabel<'static> = HostSnapshotLabel {
    name: "a:b",
    time_s: 0,
    record: "{\"x\": 1}",
};

/// The answer of the fake program to a request.
enum ScriptedAnswer {
    Says(&'static str),
    Owned(String),
    Complains(&'static str),
    Hangs,
}
use ScriptedAnswer::{Complains, Hangs, Owned, Says};

/// Returns answers in order, and records the requests.
struct ScriptedLvm {
    answers: Mutex<Vec<ScriptedAnswer>>,
    requests: Mutex<Vec<String>>,
}

impl Tools for ScriptedLvm {
    fn ask(&self, program: &str, arguments: &[&str]) -> Result<Answer, ToolError> {
        let command_line = format!("{program} {}", arguments.join(" "));
        self.requests.lock().unwrap().push(command_line.clone());
        let (is_success, output, stderr) = match self.answers.lock().unwrap().remove(0) {
            Says(output) => (true, output.to_owned(), String::new()),
            Owned(output) => (true, output, String::new()),
            Complains(stderr) => (false, String::new(), stderr.to_owned()),
            Hangs => {
                return Err(ToolError::TimedOut {
                    command_line,
                    waited: Duration::ZERO,
                });
            }
        };
        Ok(Answer {
            is_success,
            output,
            stderr,
        })
    }
}

struct World {
    lvm: Lvm,
    scripted: Arc<ScriptedLvm>,
    _locks: tempfile::TempDir,
}

impl World {
    fn new(answers: Vec<ScriptedAnswer>) -> Self {
        let scripted = Arc::new(ScriptedLvm {
            answers: Mutex::new(answers),
            requests: Mutex::default(),
        });
        let locks = tempfile::tempdir().unwrap();
        let lvm = Lvm::new(
            Arc::clone(&scripted) as _,
            locks.path().join("locks"),
            Arc::new(SystemClock::new()),
        );
        Self {
            lvm,
            scripted,
            _locks: locks,
        }
    }

    /// The requests, without those for the list of volumes.
    fn requests(&self) -> Vec<String> {
        assert!(
            self.scripted.answers.lock().unwrap().is_empty(),
            "an answer was not requested"
        );
        let all = self.scripted.requests.lock().unwrap();
        all.iter().filter(|words| !words.starts_with("lvs ")).cloned().collect()
    }
}

fn name(of: &str, name: &str) -> HostSnapshotName {
    HostSnapshotName {
        dataset: dataset("vg0", of),
        name: name.to_owned(),
    }
}

fn wanted(of: &str) -> HostSnapshotScope {
    HostSnapshotScope::all_of(dataset("vg0", of))
}

#[test]
fn volumes_are_distinguished_from_snapshots() {
    let world = World::new(vec![Says(VOLUMES)]);
    let states = world.lvm.datasets().unwrap();
    let names: Vec<_> = states.iter().map(|state| state.dataset.name.as_str()).collect();
    assert_eq!(names, ["vg0/gone", "vg0/trial", "vg0/web-2", "vg0/web1"]);
    assert!(states.iter().all(|state| state.is_volume && state.folder.is_none()));
    assert_eq!(states[1].origin.as_deref(), Some("vg0/web1@before-update"));
    // 7.81 % of 256 MiB, and 99.01 % of 2 GiB.
    assert_eq!(states[3].referenced_bytes, Some(20_964_809));
    assert_eq!(states[3].available_bytes, Some(2_126_223_560));
}

#[test]
fn snapshots_of_all_programs_are_listed_in_order() {
    let world = World::new(vec![Says(VOLUMES), Says(VOLUMES), Says(VOLUMES), Says(VOLUMES)]);
    let found = world.lvm.snapshots("vg0/web1").unwrap();
    let names: Vec<_> = found.iter().map(|snapshot| snapshot.name.name.as_str()).collect();
    assert_eq!(
        names,
        ["holdfast_2026-11-22_16:45:10Z", "before-update", "by-hand", "snapper_1"]
    );
    let summary = |snapshot: &HostSnapshot| (snapshot.hold_count, snapshot.record.is_some());
    let summary: Vec<_> = found.iter().map(summary).collect();
    assert_eq!(summary, [(0, true), (1, true), (0, false), (0, false)]);
    assert_eq!(
        found[1].record.as_deref(),
        Some("{\"schema\":1,\"machines\":[\"web1\"],\"frozen_ms\":0}")
    );
    assert_eq!(
        (found[0].time_s, found[0].identity.as_str()),
        (1_795_388_989, "ojhYox-shYs-PRCg-LgH6-Afpy-iPne-OH5yLG")
    );
    // A snapshot does not depend on its origin, and is found after the origin was removed.
    assert_eq!(world.lvm.snapshots("vg0/gone").unwrap()[0].name, name("gone", "last"));
    assert_eq!(world.lvm.dataset("vg0/gone").unwrap().available_bytes, None);
    assert!(matches!(
        world.lvm.snapshots("vg0/never"),
        Err(ProviderError::NotFound { .. })
    ));
}

#[test]
fn a_snapshot_is_created_with_its_name_and_record() {
    let of_new = VOLUMES
        .replace("\"lv_name\":\"by-hand\"", "\"lv_name\":\"web1+a+b\"")
        .replace(
            "\"lv_time\":\"1795388991\", \"lv_tags\":\"\", \"lv_permissions\":\"unknown\"",
            "\"lv_time\":\"1795388991\", \"lv_tags\":\"holdfast.of=9rBEtQ-X3yl-2OgF-QjyI-u2XQ-dZRS-XKYjrE:web1,\
         holdfast.record.0==7B!x!:#1=7D,holdfast.snapshot=a:b\", \"lv_permissions\":\"read-only\"",
        );
    let world = World::new(vec![
        Says(VOLUMES),
        Says(""),
        Owned(of_new.clone()),
        Says(""),
        Owned(of_new),
    ]);
    let all = [wanted("web1")];
    world.lvm.prepare(&all, &LABEL).unwrap();
    world.lvm.create(&all, &LABEL).unwrap();
    let settled = HostSnapshotLabel {
        record: "{\"y\": 2}",
        ..LABEL
    };
    world.lvm.commit(&all, &settled).unwrap();
    // An existing record is not written again.
    world.lvm.commit(&all, &LABEL).unwrap();
    assert_eq!(
        world.requests(),
        [
            "lvcreate -qq --yes --snapshot --permission r --setactivationskip y --addtag holdfast.snapshot=a:b \
             --addtag holdfast.of=9rBEtQ-X3yl-2OgF-QjyI-u2XQ-dZRS-XKYjrE:web1 --addtag holdfast.record.0==7B!x!:#1=7D \
             --name web1+a+b vg0/web1",
            "lvchange -qq --deltag holdfast.record.0==7B!x!:#1=7D --addtag holdfast.record.0==7B!y!:#2=7D vg0/web1+a+b",
        ]
    );
}

#[test]
fn an_impossible_snapshot_is_refused_while_preparing() {
    let refused = |answer: String, of: &str, name: &str| {
        let world = World::new(vec![Owned(answer)]);
        let label = HostSnapshotLabel { name, ..LABEL };
        let error = world.lvm.prepare(&[wanted(of)], &label).unwrap_err();
        assert!(world.requests().is_empty());
        error.to_string()
    };
    let error_after = |from: &str, to: &str| {
        let answer = VOLUMES.replace(from, to);
        assert_ne!(answer, VOLUMES);
        refused(answer, "web1", "a")
    };
    let as_it_is = |of: &str, name: &str| refused(VOLUMES.to_owned(), of, name);
    assert_eq!(
        as_it_is("web1", "before-update"),
        "lvm:vg0/web1@before-update already exists"
    );
    assert_eq!(as_it_is("web1", "by-hand"), "lvm:vg0/web1@by-hand already exists");
    assert_eq!(as_it_is("gone", "a"), "there is no lvm:vg0/gone");
    assert!(as_it_is("thick", "a").contains("not in a thin pool (linear)"));
    assert!(as_it_is("pool", "a").contains("it is a thin pool"));
    let full = error_after("\"data_percent\":\"0.99\"", "\"data_percent\":\"95.01\"");
    assert!(
        full.contains("95.01 % of the data of its thin pool vg0/pool") && full.contains("lvextend"),
        "{full}"
    );
    let full = error_after("\"metadata_percent\":\"11.72\"", "\"metadata_percent\":\"90.50\"");
    assert!(
        full.contains("90.50 % of the metadata") && full.contains("--poolmetadatasize"),
        "{full}"
    );
    let ill = error_after(
        "\"data_percent\":\"0.99\", \"metadata_percent\":\"11.72\", \"lv_health_status\":\"\"",
        "\"data_percent\":\"0.99\", \"metadata_percent\":\"11.72\", \"lv_health_status\":\"out_of_data\"",
    );
    assert!(ill.ends_with("vg0/pool has a problem: out of data"), "{ill}");
    assert!(error_after("\"vg_lock_type\":\"\"", "\"vg_lock_type\":\"sanlock\"").contains("lvmlockd"));
    assert!(
        error_after("\"vg_mda_free\":\"515584\"", "\"vg_mda_free\":\"9000\"").contains("no space for another volume")
    );
    for wrong in ["", "a b", "a+b", "../x", "-x"] {
        let world = World::new(Vec::new());
        let label = HostSnapshotLabel { name: wrong, ..LABEL };
        assert!(
            matches!(
                world.lvm.prepare(&[wanted("web1")], &label),
                Err(ProviderError::Name { .. })
            ),
            "{wrong}"
        );
    }
}

#[test]
fn a_volume_left_suspended_is_resumed() {
    let world = World::new(vec![Says(VOLUMES), Hangs, Says(""), Says(VOLUMES)]);
    world.lvm.prepare(&[wanted("web1")], &LABEL).unwrap();
    assert!(matches!(
        world.lvm.create(&[wanted("web1")], &LABEL),
        Err(ProviderError::Tool(_))
    ));
    assert_eq!(world.requests()[1..], ["lvchange -qq --refresh vg0/web1"]);
}

#[test]
fn only_the_inspected_snapshot_is_removed() {
    let snapshot = name("web1", "holdfast_2026-11-22_16:45:10Z");
    let without = |one: &str| {
        let lines = VOLUMES
            .lines()
            .filter(|line| !line.contains(&format!("\"lv_name\":\"{one}\"")));
        lines
            .collect::<Vec<_>>()
            .join("\n")
            .replace("\"515584\"},\n              ]", "\"515584\"}\n]")
    };
    let after = without("snapper_1");
    let world = World::new(vec![Says(VOLUMES), Says(""), Owned(after)]);
    world.lvm.destroy(&name("web1", "snapper_1")).unwrap();
    assert_eq!(
        world.requests(),
        [
            "lvremove -qq --yes --force --select lv_uuid=\"HC0c2R-YsNn-IKeh-47Ak-trqe-5Ir3-G7cmbf\" && \
          lv_tags!={\"holdfast.held\"} vg0/snapper_1"
        ]
    );
    // LVM does not remove a snapshot that has got a hold in the meantime, but reports success.
    let world = World::new(vec![Says(VOLUMES), Says(""), Says(VOLUMES)]);
    assert!(matches!(world.lvm.destroy(&snapshot), Err(ProviderError::Held { .. })));
    let world = World::new(vec![Says(VOLUMES)]);
    let held = world.lvm.destroy(&name("web1", "before-update")).unwrap_err();
    assert!(held.to_string().ends_with("is held: by audit"), "{held}");
    assert!(world.requests().is_empty());
    // Volumes, clones and pools are not snapshots.
    for other in ["web1", "web-2", "trial", "pool", "thick"] {
        let world = World::new(vec![Says(VOLUMES)]);
        let error = world.lvm.destroy(&name("web1", other)).unwrap_err();
        assert!(matches!(error, ProviderError::NotFound { .. }), "{other}: {error}");
    }
    let world = World::new(vec![Says(VOLUMES), Complains("  Logical volume vg0/x in use.\n")]);
    assert!(matches!(world.lvm.destroy(&snapshot), Err(ProviderError::Held { .. })));
    for dataset_name in ["-f/web1", "vg0", "vg0/a b", "/dev/vg0/web1"] {
        let mut snapshot = snapshot.clone();
        snapshot.dataset.name = dataset_name.to_owned();
        assert!(matches!(
            World::new(Vec::new()).lvm.destroy(&snapshot),
            Err(ProviderError::Name { .. })
        ));
    }
}

#[test]
fn holds_are_tags_and_the_last_release_removes_them() {
    let free = name("web1", "holdfast_2026-11-22_16:45:10Z");
    let held = name("web1", "before-update");
    let world = World::new(vec![Says(VOLUMES), Says(""), Says(VOLUMES), Says(VOLUMES), Says("")]);
    world.lvm.hold(&free, "keep").unwrap();
    assert!(matches!(
        world.lvm.hold(&held, "audit"),
        Err(ProviderError::Held { .. })
    ));
    world.lvm.release(&held, "audit").unwrap();
    assert_eq!(
        world.requests(),
        [
            "lvchange -qq --addtag holdfast.held --addtag holdfast.hold=keep vg0/web1+holdfast_2026-11-22_16+45+10Z",
            "lvchange -qq --deltag holdfast.hold=audit --deltag holdfast.held vg0/web1+before-update",
        ]
    );
    let two = VOLUMES.replace("holdfast.hold=audit", "holdfast.hold=audit,holdfast.hold=keep");
    let world = World::new(vec![Owned(two), Says(""), Says(VOLUMES)]);
    world.lvm.release(&held, "audit").unwrap();
    assert!(matches!(
        world.lvm.release(&held, "other"),
        Err(ProviderError::NotFound { .. })
    ));
    assert_eq!(
        world.requests(),
        ["lvchange -qq --deltag holdfast.hold=audit vg0/web1+before-update"]
    );
}

#[test]
fn only_a_clone_of_the_snapshot_is_removed() {
    let of = name("web1", "before-update");
    for (other, of) in [
        ("vg0/web1", &of),
        ("vg0/snapper_1", &of),
        ("vg0/trial", &name("web1", "by-hand")),
    ] {
        let world = World::new(vec![Says(VOLUMES)]);
        let refused = world.lvm.destroy_clone(other, of);
        assert!(matches!(refused, Err(ProviderError::Refused { .. })), "{other}");
    }
    let world = World::new(vec![Says(VOLUMES)]);
    let elsewhere = world.lvm.clone_to(&of, "vg1/trial").unwrap_err();
    assert!(elsewhere.to_string().contains("another volume group"), "{elsewhere}");
    let world = World::new(vec![Says(VOLUMES)]);
    assert!(matches!(
        world.lvm.clone_to(&of, "vg0/trial"),
        Err(ProviderError::Exists { .. })
    ));
}

#[test]
fn error_messages_are_classified() {
    let refused = |stderr: &'static str| World::new(vec![Complains(stderr)]).lvm.datasets().unwrap_err();
    assert!(matches!(
        refused("  Volume group \"vgnone\" not found\n  Cannot process volume group vgnone\n"),
        ProviderError::NotFound { .. }
    ));
    assert!(matches!(
        refused("  Failed to find logical volume \"vg0/nope\"\n"),
        ProviderError::NotFound { .. }
    ));
    assert!(matches!(
        refused("  WARNING: Running as a non-root user. Functionality may be unavailable.\n"),
        ProviderError::NoService { provider: "LVM", .. }
    ));
    assert!(matches!(
        refused("  Logical Volume \"a\" already exists in volume group \"vg0\"\n"),
        ProviderError::Exists { .. }
    ));
    assert!(matches!(
        refused("  Cannot create new thin volume, free space in thin pool vg0/small reached threshold.\n"),
        ProviderError::Full { .. }
    ));
    let other = refused("File descriptor 9 (x) leaked on lvs invocation. Parent PID 1: sh\n  WARNING: a\n  b c.\n");
    assert_eq!(other.to_string(), "cannot inspect all volumes: b c.");
}

#[test]
fn invalid_answers_are_errors() {
    for answer in [
        "",
        "{}",
        "{\"report\":[{\"lv\":[{\"lv_name\":\"a\"}]}]}",
        "[1",
        "{\"report\":7}",
    ] {
        let world = World::new(vec![Says(answer)]);
        assert!(
            matches!(world.lvm.datasets(), Err(ProviderError::Invalid { .. })),
            "{answer}"
        );
    }
    for (from, to) in [
        ("\"lv_size\":\"67108864\"", "\"lv_size\":\"-1\""),
        ("\"lv_time\":\"1795388993\"", "\"lv_time\":\"now\""),
    ] {
        let world = World::new(vec![Owned(VOLUMES.replace(from, to))]);
        assert!(
            matches!(world.lvm.datasets(), Err(ProviderError::Invalid { .. })),
            "{to}"
        );
    }
}
