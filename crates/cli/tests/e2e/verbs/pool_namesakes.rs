//! Machines of other pools and hypervisors do not continue the history of a machine with the same name.

use std::process::Output;

use super::pools::{World, with_login};
use crate::program::{stderr, stdout};

/// Backs up the machine of `other` into the repository of `world`.
fn back_up_from(world: &World, other: &World, options: &[&str]) -> Output {
    let (machine, fingerprint) = (other.machine(), other.pool.fingerprint());
    let password = other.rig.path("password").display().to_string();
    let login = ["--pool-password-file", &password, "--pool-certificate", &fingerprint];
    world.rig.run(&[&["backup", &machine], &login[..], options].concat())
}

/// A machine that has moved, or a replica for disaster recovery: the pool does not know which.
#[test]
fn a_machine_of_the_same_uuid_in_another_pool_is_warned_about() {
    let (world, other) = (World::new(), World::new());
    other.pool.set_field("VM", &other.vm, "uuid", world.vm.clone().into());
    world.back_up(&[]);
    let output = back_up_from(&world, &other, &[]);
    let text = stderr(&output);
    assert_eq!(output.status.code(), Some(3), "{text}");
    assert!(
        text.contains(&world.address().replace("xen://", "")) && text.contains("--machine NAME"),
        "{text}"
    );
    // The warning comes once for a moved machine, and never for one that is backed up under another name.
    for options in [&[][..], &["--machine", "dr"]] {
        let output = back_up_from(&world, &other, options);
        assert_eq!(output.status.code(), Some(0), "{} {}", stdout(&output), stderr(&output));
    }
}

#[test]
fn a_machine_of_a_pool_does_not_continue_the_history_of_one_of_another_hypervisor() {
    let world = World::new();
    // An archive of the machine, with the UUID of its origin.
    world.back_up(&["--machine", "first"]);
    world.rig.ok(&["export", "first", "first.xva"]);
    world.rig.ok(&["import", "first.xva", "--machine", "web1"]);
    // Another machine has the name there.
    let other = World::new();
    let output = back_up_from(&world, &other, &[]);
    let text = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(
        text.contains("another machine") && text.contains("--same-machine"),
        "{text}"
    );
    let fingerprint = world.pool.fingerprint();
    let machine = world.machine();
    world.rig.ok(&with_login(&["backup", &machine], &fingerprint));
    // The name alone does not show that they are the same machine.
    let output = back_up_from(&world, &other, &["--machine", "web1"]);
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    let output = back_up_from(&world, &other, &["--machine", "web1", "--same-machine"]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
}
