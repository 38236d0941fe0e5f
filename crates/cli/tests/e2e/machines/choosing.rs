//! Selection of machines by command-line arguments, with a real libvirt.

use serde_json::Value;

use super::{World, at};

fn mark(world: &World, machine: &str, mark: &str) {
    let uri = "urn:holdfast:domain:1";
    let mark = format!("<backup {mark}/>");
    let words = [
        "metadata", machine, "--config", "--uri", uri, "--key", "holdfast", "--set", &mark,
    ];
    world.lab.virsh(&words);
}

fn names(list: &Value) -> Vec<&str> {
    let names = list.as_array().unwrap().iter();
    names.map(|machine| machine["name"].as_str().unwrap()).collect()
}

#[test]
fn patterns_tags_and_all_select_machines_unless_excluded() {
    let world = World::new();
    for name in ["web2", "db1"] {
        world.lab.define(name, &["raw"]);
    }
    mark(&world, "web2", "enabled='no' tags='prod'");
    mark(&world, "db1", "tags='prod db'");
    let uri = world.lab.uri();
    let backed_up = |words: &[&str]| {
        let report = world.rig.report(&at(&uri, &[&["backup"], words].concat()));
        let machines = report["machines"].as_array().unwrap().iter();
        let names = machines.map(|machine| machine["snapshot"]["machine"].as_str().unwrap().to_owned());
        let left_out = names_and_reasons(&report["left_out_machines"]);
        (names.collect::<Vec<_>>(), left_out)
    };
    let owner = "web2: its own configuration leaves it out".to_owned();
    assert_eq!(backed_up(&["web*"]), (vec!["web1".to_owned()], vec![owner.clone()]));
    assert_eq!(backed_up(&["tag:prod"]), (vec!["db1".to_owned()], vec![owner.clone()]));
    let excluded = "web1: it is excluded".to_owned();
    assert_eq!(
        backed_up(&["--all", "--exclude-machine", "*b1"]),
        (vec![], vec!["db1: it is excluded".to_owned(), excluded, owner])
    );
    assert_eq!(backed_up(&["web2"]), (vec!["web2".to_owned()], vec![]));

    let (kind, text) = world.rig.error(1, &at(&uri, &["backup", "missing*"]));
    assert!(kind == "not-found" && text.contains("missing*"), "{text}");
    let (_, text) = world
        .rig
        .error(2, &at(&uri, &["backup", "web1", "--exclude-machine", "web1"]));
    assert!(text.contains("--exclude-machine"), "{text}");
    let (_, text) = world.rig.error(2, &["backup", "--all", "./image.raw"]);
    assert!(text.contains("--all"), "{text}");
}

fn names_and_reasons(list: &Value) -> Vec<String> {
    let text = |one: &Value, key: &str| one[key].as_str().unwrap().to_owned();
    let list = list.as_array().unwrap().iter();
    list.map(|one| format!("{}: {}", text(one, "name"), text(one, "reason")))
        .collect()
}

#[test]
fn machines_are_listed_with_the_disks_that_a_backup_reads() {
    let world = World::new();
    world.lab.define("db1", &["raw"]);
    mark(&world, "db1", "tags='db' exclude='vda' enabled='no'");
    let uri = world.lab.uri();
    let report = world.rig.report(&at(&uri, &["machines"]));
    let machines = &report["machines"];
    assert_eq!(names(machines), ["db1", "web1"]);
    let (db, web) = (&machines[0], &machines[1]);
    assert_eq!((&db["state"], &web["state"]), (&"shut off".into(), &"running".into()));
    assert_eq!((&db["is_left_out"], &db["tags"][0]), (&true.into(), &"db".into()));
    assert_eq!(names(&web["disks"]), ["vda", "vdb", "sda"]);
    for disk in [&web["disks"][0], &web["disks"][1], &db["disks"][0]] {
        assert_eq!(disk["size_bytes"], 8 << 20, "{disk}");
    }
    assert_eq!(web["disks"][0]["source"], world.lab.path("web1-a").to_str().unwrap());
    assert!(web["disks"][0]["left_out"].is_null() && web["disks"][2]["left_out"] == "the drive is empty");
    assert!(db["disks"][0]["left_out"].is_string());

    let report = world.rig.report(&at(&uri, &["machines", "tag:db"]));
    assert_eq!(names(&report["machines"]), ["db1"]);
    let page = world.rig.ok(&at(&uri, &["machines", "*"]));
    assert!(
        page.contains("by its own configuration") && page.contains("8.0 MiB"),
        "{page}"
    );
    let (_, text) = world.rig.error(2, &at(&uri, &["machines", "a.raw"]));
    assert!(text.contains("image"), "{text}");
}
