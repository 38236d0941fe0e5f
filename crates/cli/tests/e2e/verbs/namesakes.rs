//! Two machines with one name: neither is compared with the other, and neither loses its backups to the other.
//!
//! libvirt's test driver has the machines; they are shut off, so their images are read.

use crate::rig::{Rig, noise};

const A: &str = "11111111-1111-4111-8111-111111111111";
const B: &str = "22222222-2222-4222-8222-222222222222";

/// Defines a machine in libvirt's test driver; returns the arguments to back it up.
fn machine(rig: &Rig, name: &str, uuid: &str, image: &str) -> [String; 4] {
    let image = rig.path(image).display().to_string();
    let text = format!(
        "<node><domain type='test' xmlns:test='http://libvirt.org/schemas/domain/test/1.0'><name>{name}</name>\
         <uuid>{uuid}</uuid><memory unit='MiB'>64</memory><os><type arch='x86_64'>hvm</type></os>\
         <test:runstate>5</test:runstate><devices><disk type='file' device='disk'><driver name='qemu' type='raw'/>\
         <source file='{image}'/><target dev='vda' bus='virtio'/></disk></devices></domain></node>"
    );
    let node = format!("{uuid}.xml");
    rig.write(&node, text.as_bytes());
    let uri = format!("test://{}", rig.path(&node).display());
    ["backup".into(), name.into(), "--connect".into(), uri]
}

fn words(words: &[String; 4]) -> Vec<&str> {
    words.iter().map(String::as_str).collect()
}

fn rig() -> Rig {
    let rig = Rig::new();
    rig.write("a.raw", &noise(70_000, 1));
    rig.write("b.raw", &noise(90_000, 2));
    rig
}

/// The ids of all snapshots, oldest first.
fn ids(rig: &Rig) -> Vec<String> {
    let report = rig.report(&["list"]);
    let snapshots = report["snapshots"].as_array().unwrap().iter();
    snapshots
        .map(|snapshot| snapshot["id"].as_str().unwrap().to_owned())
        .collect()
}

/// A repository with snapshots of two machines under the name "web", copied from two repositories.
fn mixed() -> Rig {
    let rig = rig();
    rig.ok(&words(&machine(&rig, "web", A, "a.raw")));
    rig.ok(&["init", "--no-encryption", "--repository", "other"]);
    let second = machine(&rig, "web", B, "b.raw");
    rig.ok(&[&words(&second)[..], &["--repository", "other"]].concat());
    let copied = rig.json(3, &["copy", "--repository", "other", "--to", "repo", "--all"]);
    let warnings = copied["warnings"].to_string();
    assert!(warnings.contains(A) && warnings.contains(B), "{warnings}");
    // The warning comes only while no snapshot of the other machine is there.
    rig.ok(&["copy", "--repository", "other", "--to", "repo", "--all"]);
    rig
}

#[test]
fn a_machine_does_not_continue_the_history_of_another_one_of_its_name() {
    let rig = rig();
    let (first, second) = (machine(&rig, "web", A, "a.raw"), machine(&rig, "web", B, "b.raw"));
    rig.ok(&words(&first));
    for more in [&[][..], &["--machine", "web"]] {
        let (kind, message) = rig.error(1, &[&words(&second)[..], more].concat());
        assert!(
            kind == "exists" && message.contains(A) && message.contains(B),
            "{message}"
        );
        assert!(
            message.contains("--machine") && message.contains("--same-machine"),
            "{message}"
        );
    }
    // Images have no UUID: they do not continue the history of a machine with a UUID, nor the reverse.
    assert_eq!(rig.error(1, &["backup", "b.raw", "--machine", "web"]).0, "exists");
    rig.ok(&["backup", "b.raw", "--machine", "images"]);
    assert_eq!(
        rig.error(1, &[&words(&second)[..], &["--machine", "images"]].concat())
            .0,
        "exists"
    );
    assert_eq!(ids(&rig).len(), 2, "what is refused stores nothing");
    rig.ok(&[&words(&second)[..], &["--machine", "web-b"]].concat());
    rig.ok(&words(&first));
    // The case of a UUID does not matter, and a renamed machine can continue under its old name.
    rig.ok(&words(&machine(&rig, "web", &A.to_uppercase(), "a.raw")));
    let renamed = machine(&rig, "www", A, "a.raw");
    let output = rig.code(0, &words(&renamed));
    let message = crate::program::stderr(&output);
    assert!(message.contains("--machine web"), "{message}");
    rig.ok(&[&words(&renamed)[..], &["--machine", "web"]].concat());
}

/// libvirt allows names with a special meaning in Holdfast: such a machine is backed up under another name, and can be
/// restored.
#[test]
fn a_machine_with_a_reserved_name_is_stored_under_another() {
    let rig = rig();
    for name in ["web@1", "web:vda", "-x", "latest"] {
        let mut words = machine(&rig, name, A, "a.raw");
        words[1] = format!("libvirt:{name}");
        let words = [words[0].as_str(), &words[1], "--connect", &words[3]];
        let (kind, message) = rig.error(1, &words);
        assert!(kind == "bad-name" && message.contains("--machine NAME"), "{message}");
        rig.ok(&[&words[..], &["--machine", "listed"]].concat());
        let storage = rig.path("new").display().to_string();
        std::fs::create_dir_all(&storage).unwrap();
        let restore = [
            "restore",
            "listed",
            "--to-machine",
            "--dry-run",
            "--connect",
            words[3],
            "--storage",
            &storage,
        ];
        let message = rig.ok(&restore);
        assert!(message.contains("<name>listed-restored</name>"), "{message}");
    }
}

#[test]
fn an_archive_does_not_become_the_newest_snapshot_of_a_machine() {
    let rig = rig();
    let live = machine(&rig, "web", A, "a.raw");
    rig.ok(&words(&live));
    rig.ok(&["export", "web", "web.ova"]);
    let (kind, message) = rig.error(1, &["import", "web.ova"]);
    assert!(kind == "exists" && message.contains("--machine"), "{message}");
    rig.ok(&["import", "web.ova", "--machine", "web-archive"]);
    rig.ok(&["import", "web.ova", "--machine", "web-archive"]);
    rig.ok(&["restore", "web:vda", "out.raw"]);
    let report = rig.report(&words(&live));
    let compared = report["machines"][0]["snapshot"]["parent"].as_str().map(str::to_owned);
    assert_eq!(compared, Some(ids(&rig)[0].clone()));
    // Another machine does not continue the history of an archive either.
    let second = machine(&rig, "web", B, "b.raw");
    let other = [&words(&second)[..], &["--machine", "web-archive"]].concat();
    assert_eq!(rig.error(1, &other).0, "exists");
}

#[test]
fn prune_keeps_the_newest_of_each_machine_of_a_name() {
    let rig = mixed();
    let before = ids(&rig);
    let report = rig.report(&["prune", "--keep-daily", "7"]);
    assert_eq!(report["removed_count"], 0, "{report}");
    let machines = report["machines"].as_array().unwrap().iter();
    let distinctions: Vec<_> = machines.map(|machine| machine["distinction"].to_string()).collect();
    assert_eq!(distinctions, [format!("\"UUID {A}\""), format!("\"UUID {B}\"")]);
    assert_eq!(ids(&rig), before);
    // The machine that has the name continues its own history; of its snapshots only the newest is kept, and those of
    // the other machine are kept.
    rig.ok(&words(&machine(&rig, "web", B, "b.raw")));
    assert_eq!(rig.report(&["prune", "--keep-last", "1"])["removed_count"], 1);
    let left = ids(&rig);
    assert!(left.len() == 2 && left.contains(&before[0]), "{left:?} of {before:?}");
}

#[test]
fn the_copy_status_distinguishes_machines_of_one_name() {
    let rig = mixed();
    rig.ok(&["init", "--no-encryption", "-r", "far"]);
    rig.ok(&["copy", "--to", "far", &ids(&rig)[0]]);
    let report = rig.report(&["copy", "--to", "far", "--status"]);
    let machines = report["machines"].as_array().unwrap().iter();
    let distinctions: Vec<_> = machines
        .map(|machine| (machine["distinction"].to_string(), machine["missing_count"].clone()))
        .collect();
    // The snapshot of the second machine is missing; the first one is up to date.
    assert_eq!(
        distinctions,
        [(format!("\"UUID {A}\""), 0.into()), (format!("\"UUID {B}\""), 1.into())],
        "{report}"
    );
    let message = rig.ok(&["copy", "--to", "far", "--status"]);
    assert!(message.contains(&format!("web (UUID {B})")), "{message}");
}

#[test]
fn an_ambiguous_name_selects_no_machine() {
    let rig = mixed();
    let all = ids(&rig);
    for name in ["web", "web@latest", "web:vda", "web@2100-01-01"] {
        let (kind, message) = rig.error(1, &["restore", name, "out.raw"]);
        assert!(
            kind == "ambiguous"
                && message.contains(A)
                && message.contains(&all[0][..12])
                && message.contains(&all[1][..12]),
            "{message}"
        );
    }
    assert!(!rig.path("out.raw").exists());
    rig.ok(&["restore", &format!("{}:vda", all[0]), "out.raw"]);
    assert!(rig.read("out.raw").starts_with(&rig.read("a.raw")));
    let listed = rig.ok(&["list"]);
    assert!(
        listed.contains(A) && listed.contains(B) && listed.contains("2 machines"),
        "{listed}"
    );
    assert_eq!(rig.report(&["list"])["shared_names"][0]["machine_count"], 2);
    assert_eq!(rig.report(&["show", &all[1]])["namesake_count"], 1);
    let output = rig.code(1, &["monitor", "machines", "--within", "26h"]);
    let message = crate::program::stdout(&output);
    assert!(
        message.starts_with("WARNING: web is the name of 2 machines"),
        "{message}"
    );
}

#[test]
fn a_recreated_machine_continues_its_history_only_on_request() {
    let rig = mixed();
    let anew = machine(&rig, "web", "33333333-3333-4333-8333-333333333333", "b.raw");
    assert_eq!(rig.error(1, &words(&anew)).0, "exists");
    rig.ok(&[&words(&anew)[..], &["--same-machine"]].concat());
    // From now on they count as one machine: also for later snapshots, and after the snapshot with the statement is
    // removed.
    rig.ok(&words(&anew));
    let report = rig.report(&["prune", "--keep-last", "1"]);
    assert_eq!(
        (report["removed_count"].as_u64(), report["kept_count"].as_u64()),
        (Some(3), Some(1))
    );
    rig.ok(&["restore", "web", "out.raw"]);
    rig.ok(&["monitor", "machines", "--within", "26h"]);
    // The previous machine does not get the name back without a statement.
    let before = machine(&rig, "web", A, "a.raw");
    assert_eq!(rig.error(1, &words(&before)).0, "exists");
}
