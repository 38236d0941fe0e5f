//! Scripts for machines from existing sanoid.conf files, and the lines that replace them.

use std::path::Path;

use serde_json::json;

use super::policies::{FREQUENTLY, Policed};

/// Typical scripts: an external snapshot with memory before, blockcommit after, and removal of the memory file together
/// with the snapshot.
fn write_scripts(policed: &Policed) -> String {
    let rig = &policed.setup.world.rig;
    let virsh = format!("virsh -q -c '{}'", policed.setup.world.lab.uri());
    let dumps = rig.path("dumps").display().to_string();
    std::fs::create_dir_all(&dumps).unwrap();
    let pre = format!(
        "#!/bin/sh -e\n{virsh} snapshot-create-as web1 \"$SANOID_SNAPNAME\" --memspec \"{dumps}/$SANOID_SNAPNAME.ram,snapshot=external\" \
         --diskspec vda,snapshot=external --diskspec vdb,snapshot=external --atomic\n"
    );
    let post = format!(
        "#!/bin/sh -e\nfor disk in vda vdb; do {virsh} blockcommit web1 $disk --active --pivot --wait; done\n\
         {virsh} snapshot-delete web1 \"$SANOID_SNAPNAME\" --metadata\n"
    );
    let prune = format!("#!/bin/sh -e\nrm \"{dumps}/$SANOID_SNAPNAME.ram\"\n");
    let scripts = [
        ("pre_snapshot_script", pre),
        ("post_snapshot_script", post),
        ("pruning_script", prune),
    ];
    let lines = scripts.map(|(key, text)| {
        rig.write(key, text.as_bytes());
        format!("{key} = /bin/sh {}\n", rig.path(key).display())
    });
    lines.concat() + "no_inconsistent_snapshot = yes\nscript_timeout = 120\n"
}

fn entries(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap();
    entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect()
}

const HOURLY: &str = "hourly = 1\ndaily = 0\nmonthly = 0\nautosnap = yes\nautoprune = yes\n";

#[test]
fn a_pair_of_libvirt_scripts_runs_unchanged() {
    let Some(policed) = Policed::new() else { return };
    let scripts = write_scripts(&policed);
    policed.write(&format!("{FREQUENTLY}{scripts}"));
    let old = "autosnap_2020-01-01_00:00:00_hourly";
    policed.make(old);
    let dumps = policed.setup.world.rig.path("dumps");
    policed.setup.world.rig.write(&format!("dumps/{old}.ram"), b"old");
    policed.wait_until_older();
    let done = policed.run(0, &["--quiesce", "off"]);
    assert_eq!(done["taken"].as_array().unwrap().len(), 1, "{done}");
    let names = policed.names();
    assert!(names.len() == 1 && names[0] != old, "{names:?}");
    // The memory of the new snapshot exists, that of the pruned one is removed, and the machine uses its own images
    // again.
    assert_eq!(entries(&dumps), [format!("{}.ram", names[0])]);
    let disks = policed.setup.world.lab.virsh(&["domblklist", "web1"]);
    assert!(disks.contains("web1-a\n") && disks.contains("web1-b"), "{disks}");
    policed.setup.world.assert_runs_and_is_clean();
}

#[test]
fn three_lines_replace_the_scripts() {
    let Some(policed) = Policed::new() else { return };
    policed.write(HOURLY);
    let done = policed.run(0, &["--with-memory"]);
    assert_eq!(done["taken"][0]["machines"][0]["consistency"], "memory", "{done}");
    let listed = policed.setup.listed(&["web1"]);
    assert_eq!(listed[0]["memories"], json!(["web1"]));
    // Snapshots that another program has removed: the next run notices it.
    for name in policed.names() {
        holdfast_test_kit::file_systems::system("zfs", &["destroy", &format!("{}@{name}", policed.pool)]).unwrap();
    }
    let done = policed.run(0, &["--prune-only"]);
    assert_eq!(done["forgotten_state_count"], 1, "{done}");
    policed.setup.world.assert_runs_and_is_clean();
}
