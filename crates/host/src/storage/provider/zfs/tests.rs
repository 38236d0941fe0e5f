//! Tests of the arguments for ZFS, and of the parsing of its answers, with a fake program.

use std::sync::{Arc, Mutex};

use holdfast_block::SystemClock;

use super::super::{
    Dataset, HostSnapshotLabel, HostSnapshotName, HostSnapshotScope, Provider, ProviderError, ProviderKind,
};
use super::{TemporaryClone, TemporaryCloneKind, Zfs};
use crate::system::process::{Answer, ToolError, Tools};

/// Returns scripted answers in order, and records the requests.
#[derive(Default)]
struct ScriptedZfs {
    answers: Mutex<Vec<Result<String, String>>>,
    requests: Mutex<Vec<String>>,
}

impl Tools for ScriptedZfs {
    fn ask(&self, program: &str, arguments: &[&str]) -> Result<Answer, ToolError> {
        assert!(["zfs", "zpool"].contains(&program));
        self.requests.lock().unwrap().push(arguments.join(" "));
        let answer = self.answers.lock().unwrap().remove(0);
        let (is_success, output, stderr) = match answer {
            Ok(output) => (true, output, String::new()),
            Err(stderr) => (false, String::new(), stderr),
        };
        Ok(Answer {
            is_success,
            output,
            stderr,
        })
    }
}

fn zfs(answers: &[Result<&str, &str>]) -> (Zfs, Arc<ScriptedZfs>) {
    let own = |answer: &Result<&str, &str>| answer.map(str::to_owned).map_err(str::to_owned);
    let scripted = Arc::new(ScriptedZfs {
        answers: Mutex::new(answers.iter().map(own).collect()),
        requests: Mutex::default(),
    });
    (
        Zfs::new(
            Arc::clone(&scripted) as _,
            "/run/views".into(),
            Arc::new(SystemClock::new()),
        ),
        scripted,
    )
}

fn wanted(name: &str) -> HostSnapshotScope {
    HostSnapshotScope::all_of(dataset(name))
}

fn dataset(name: &str) -> Dataset {
    Dataset {
        provider: ProviderKind::Zfs,
        name: name.to_owned(),
    }
}

fn snapshot(dataset_name: &str, name: &str) -> HostSnapshotName {
    HostSnapshotName {
        dataset: dataset(dataset_name),
        name: name.to_owned(),
    }
}

const LABEL: HostSnapshotLabel<'static> = HostSnapshotLabel {
    name: "now",
    time_s: 0,
    record: "{}",
};

#[test]
fn datasets_of_one_pool_are_one_group_if_zfs_supports_it() {
    let all = [wanted("a/x"), wanted("b/y"), wanted("a/z")];
    let (newer, scripted) = zfs(&[Ok("zfs-2.1.11-1\n"), Ok("")]);
    let groups = newer.groups(&all).unwrap();
    assert_eq!(groups, [vec![wanted("a/x"), wanted("a/z")], vec![wanted("b/y")]]);
    newer.create(&groups[0], &LABEL).unwrap();
    assert_eq!(
        scripted.requests.lock().unwrap()[1],
        "snapshot -o holdfast:record={} a/x@now a/z@now"
    );
    let (older, _) = zfs(&[Err("unrecognized command 'version'")]);
    assert_eq!(older.groups(&all).unwrap().len(), 3);
}

#[test]
fn snapshots_are_ordered_and_have_their_own_records() {
    let answer = "t/v@b\tcreation\t20\t-\nt/v@b\tused\t5\t-\nt/v@b\tcreatetxg\t9\t-\nt/v@b\tguid\t77\t-\n\
                  t/v@a\tcreation\t20\t-\nt/v@a\tcreatetxg\t10\t-\nt/v@a\tuserrefs\t2\t-\n\
                  t/v/child@z\tcreation\t1\t-\nt/v\tcreation\t1\t-\n";
    // The text of a record cannot change anything else.
    let records =
        "t/v@b\t{\"x\":\t1}\tlocal\nt/v@b\tcreation\t99\tlocal\nt/v@c\tx\tlocal\nt/v@a\t{}\tinherited from t\nmore\n";
    let (zfs, _) = zfs(&[Ok(""), Ok(answer), Ok(records)]);
    let snapshots = zfs.snapshots("t/v").unwrap();
    let names: Vec<_> = snapshots.iter().map(|snapshot| &snapshot.name.name[..]).collect();
    assert_eq!(names, ["b", "a"]);
    assert_eq!(
        (snapshots[0].record.as_deref(), &snapshots[0].identity[..]),
        (Some("{\"x\":\t1}"), "77")
    );
    assert_eq!((snapshots[1].record.as_deref(), snapshots[1].hold_count), (None, 2));
}

#[test]
fn only_snapshots_are_destroyed() {
    let (zfs, scripted) = zfs(&[]);
    for (dataset, name) in [
        ("t/v", ""),
        ("t/v", "a,b"),
        ("t/v", "a%b"),
        ("", "a"),
        ("t@x", "a"),
        ("-r", "a"),
        ("t/v", "-r"),
        ("t/v", "a b"),
        ("t/v", "a/b"),
        ("t,u", "a"),
        ("/t", "a"),
    ] {
        let destroyed = zfs.destroy(&snapshot(dataset, name));
        assert!(matches!(destroyed, Err(ProviderError::Name { .. })), "{dataset}@{name}");
    }
    assert!(scripted.requests.lock().unwrap().is_empty());
}

#[test]
fn error_messages_are_classified() {
    let hold = Ok("t/v@a\tuserrefs\t1\t-\n");
    let refused = |stderr: &str| zfs(&[Err(stderr), hold]).0.destroy(&snapshot("t/v", "a")).unwrap_err();
    assert!(matches!(
        refused("cannot open 't/v@a': dataset does not exist"),
        ProviderError::NotFound { .. }
    ));
    assert!(matches!(
        refused("could not find any snapshots to destroy; check snapshot names."),
        ProviderError::NotFound { .. }
    ));
    assert!(matches!(
        refused("cannot destroy snapshot t/v@a: dataset is busy"),
        ProviderError::Held { .. }
    ));
    let clones = "cannot destroy 't/v@a': snapshot has dependent clones\nuse '-R' to destroy the following datasets:\nt/c\nt/d\n";
    assert!(matches!(refused(clones), ProviderError::HasClones { clones, .. } if clones == "t/c, t/d"));
    let suspended = "cannot destroy 't/v@a': pool I/O is currently suspended";
    assert!(matches!(refused(suspended), ProviderError::Suspended { .. }));
    assert!(matches!(
        refused("cannot create snapshot 't/v@a': out of space"),
        ProviderError::Full { .. }
    ));
    let other = refused("cannot destroy 't/v@a': permission denied\n").to_string();
    assert_eq!(other, "cannot remove t/v@a: cannot destroy 't/v@a': permission denied");
}

#[test]
fn holds_are_listed_where_zfs_can() {
    let listed = "NAME                TAG        TIMESTAMP\ntank/my vms@one     audit      Fri Nov 27  4:39 2026\n\
                  tank/my vms@one     .send-1-2  Fri Nov 27  4:40 2026\n";
    let (provider, requests) = zfs(&[Ok(listed), Ok(""), Err(""), Err("permission denied\n")]);
    let held = snapshot("tank/my vms", "one");
    let tags = || provider.hold_tags(&held);
    assert_eq!(tags().unwrap().unwrap(), ["audit", ".send-1-2"]);
    assert_eq!(tags().unwrap(), Some(Vec::new()));
    assert_eq!(tags().unwrap(), None, "zfs-fuse fails without a message");
    assert!(matches!(tags(), Err(ProviderError::Refused { .. })));
    assert_eq!(requests.requests.lock().unwrap()[0], "holds tank/my vms@one");
}

/// A snapshot that is in use for a moment is removed; one with a hold is refused at once.
#[test]
fn only_a_snapshot_without_holds_is_removed_with_retries() {
    let busy = Err("cannot destroy 't/v@a': dataset is busy\n");
    let holds = |count| format!("t/v@a\tuserrefs\t{count}\t-\n");
    let (none, one) = (holds(0), holds(1));
    let (in_use, requests) = zfs(&[busy, Ok(&none), busy, Ok(&none), Ok("")]);
    in_use.destroy(&snapshot("t/v", "a")).unwrap();
    assert_eq!(requests.requests.lock().unwrap().len(), 5);
    let (held, requests) = zfs(&[busy, Ok(&one)]);
    let refused = held.destroy(&snapshot("t/v", "a"));
    assert!(matches!(refused, Err(ProviderError::Held { .. })), "{refused:?}");
    assert_eq!(requests.requests.lock().unwrap().len(), 2);
}

#[test]
fn a_release_without_a_hold_is_reported_as_not_found() {
    let answer = "cannot release hold from snapshot 'tank@one': no such tag on this dataset\n";
    let (provider, _) = zfs(&[Err(answer)]);
    let released = provider.release(&snapshot("tank", "one"), "audit");
    assert!(matches!(released, Err(ProviderError::NotFound { .. })), "{released:?}");
}

#[test]
fn a_record_too_long_for_some_zfs_is_refused() {
    let (zfs, _) = zfs(&[]);
    let record = "x".repeat(1001);
    let label = HostSnapshotLabel {
        record: &record,
        ..LABEL
    };
    assert!(zfs.create(&[wanted("t/v")], &label).is_err());
}

#[test]
fn invalid_answers_are_errors() {
    let (zfs, _) = zfs(&[Ok(""), Ok("t/v@a creation 20 -\n")]);
    assert!(matches!(zfs.snapshots("t/v"), Err(ProviderError::Invalid { .. })));
    let (zfs, _) = self::zfs(&[Ok(""), Ok("t/v@a\tcreation\t20\t-\nt/v@a\tcreation\t1\t-\n")]);
    assert!(matches!(zfs.snapshots("t/v"), Err(ProviderError::Invalid { .. })));
}

#[test]
fn a_suspended_pool_is_found_before_the_point_in_time() {
    let pool = |name, health| format!("{name}\t960M\t1%\t{health}\t950M\n");
    let (well, ill) = (pool("a", "ONLINE"), pool("b", "SUSPENDED"));
    let (zfs, scripted) = zfs(&[Ok("zfs-2.1.11-1\n"), Ok(&well), Ok(&ill)]);
    let prepared = zfs.prepare(&[wanted("b/y"), wanted("a/x"), wanted("a")], &LABEL);
    assert!(
        matches!(&prepared, Err(ProviderError::Suspended { what, .. }) if what == "b"),
        "{prepared:?}"
    );
    assert_eq!(scripted.requests.lock().unwrap().len(), 3);
}

/// Clones of users with similar names, permanently mounted clones, and inherited marks are not temporary clones.
#[test]
fn temporary_clones_are_found_by_their_own_marks() {
    let views = "t/holdfast-view-0a-0\t0a-0\tlocal\nt/holdfast-view-atmnt\tmount\tlocal\nt/mine\tx\tlocal\n\
                 t/holdfast-view-1\tx\tinherited from t\n";
    let unfinished = "t/trial\ttrial\tlocal\nt/trial/below\ttrial\tinherited from t/trial\nt/trial@a\ttrial\tlocal\n";
    let makers = "t/trial\t{\"process\":1}\tlocal\n";
    let (zfs, scripted) = zfs(&[Ok(""), Ok(views), Ok(unfinished), Ok(makers)]);
    let found = zfs.temporary_clones("t").unwrap();
    let summary: Vec<_> = found
        .iter()
        .map(|one| (&one.name[..], &one.kind, &one.maker[..]))
        .collect();
    assert_eq!(
        summary,
        [
            ("t/holdfast-view-0a-0", &TemporaryCloneKind::View, ""),
            (
                "t/trial",
                &TemporaryCloneKind::Machine("trial".to_owned()),
                "{\"process\":1}"
            ),
        ]
    );
    assert!(scripted.requests.lock().unwrap()[1].ends_with("-s local,received -t filesystem,volume holdfast:view t"));
}

/// A clone that was finished or replaced is not destroyed.
#[test]
fn only_a_temporary_clone_is_destroyed() {
    let left = TemporaryClone {
        name: "t/trial".to_owned(),
        kind: TemporaryCloneKind::Machine("trial".to_owned()),
        maker: String::new(),
    };
    // The mark was removed, or the dataset is not a clone.
    let (finished, requests) = zfs(&[Ok(""), Ok(""), Ok("")]);
    assert!(matches!(
        finished.destroy_temporary(&left),
        Err(ProviderError::NotFound { .. })
    ));
    assert_eq!(requests.requests.lock().unwrap().len(), 3);
    let mark = "t/trial\ttrial\tlocal\n";
    let (whole, requests) = zfs(&[Ok(""), Ok(""), Ok(mark), Ok(""), Ok("t/trial\torigin\t-\t-\n")]);
    assert!(matches!(
        whole.destroy_temporary(&left),
        Err(ProviderError::NotFound { .. })
    ));
    assert_eq!(requests.requests.lock().unwrap().len(), 5);
    let (clone, requests) = zfs(&[
        Ok(""),
        Ok(""),
        Ok(mark),
        Ok(""),
        Ok("t/trial\torigin\tt/v@a\t-\n"),
        Ok(""),
    ]);
    clone.destroy_temporary(&left).unwrap();
    assert_eq!(requests.requests.lock().unwrap()[5], "destroy t/trial");
}
