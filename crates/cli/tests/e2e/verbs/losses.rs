//! Snapshots that are missing without a removal: every verb reports them, and none deletes what could restore them.

use crate::rig::{Rig, noise};

fn rig_of_two() -> Rig {
    let rig = Rig::new();
    for (machine, seed) in [("web1", 1), ("web2", 2)] {
        let image = format!("{machine}.raw");
        rig.write(&image, &noise(300_000, seed));
        rig.ok(&["backup", &image, "--machine", machine]);
    }
    rig
}

/// Removes the files of all snapshots; returns their ids.
fn lose_snapshots(rig: &Rig) -> Vec<String> {
    let listed = rig.report(&["list"])["snapshots"].clone();
    let ids: Vec<String> = listed
        .as_array()
        .unwrap()
        .iter()
        .map(|one| one["id"].as_str().unwrap().to_owned())
        .collect();
    for id in &ids {
        std::fs::remove_file(rig.path(&format!("repo/snapshots/{id}"))).unwrap();
    }
    ids
}

#[test]
fn a_lost_snapshot_is_reported_by_every_verb() {
    let rig = rig_of_two();
    let ids = lose_snapshots(&rig);
    for words in [&["list"][..], &["verify"], &["stats"]] {
        let output = rig.code(5, words);
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(ids.iter().all(|id| text.contains(&**id)), "{words:?}: {text}");
    }
    for words in [&["gc"][..], &["gc", "--dry-run"], &["prune", "--keep-last", "1"]] {
        let (kind, message) = rig.error(5, words);
        assert_eq!(kind, "damage", "{words:?}");
        assert!(message.contains(&ids[0]), "{words:?}: {message}");
    }
    rig.ok(&["repair"]);
    rig.ok(&["gc"]);
    rig.ok(&["verify"]);
    rig.ok(&["restore", "web1", "out.raw"]);
    assert!(rig.read("out.raw") == rig.read("web1.raw"));
}

#[test]
fn a_loss_is_accepted_by_id_or_for_all() {
    let rig = rig_of_two();
    let ids = lose_snapshots(&rig);
    rig.code(2, &["gc", "--accept-loss", "everything"]);
    rig.error(1, &["gc", "--accept-loss", "00000000"]);
    // gc still asks about the other one.
    rig.error(5, &["gc", "--accept-loss", &ids[0][..8]]);
    let report = rig.report(&["gc", "--accept-loss", "all"]);
    assert_eq!(report["accepted"].as_array().unwrap().len(), 1, "{report}");
    assert!(report["done"]["deleted_pack_count"].as_u64().unwrap() > 0, "{report}");
    rig.ok(&["gc"]);
    rig.ok(&["list"]);
    rig.ok(&["verify"]);
}
