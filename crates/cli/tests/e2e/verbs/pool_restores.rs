//! Restores of machines to a pool.

use holdfast_xapi_server::{Fault, SrPlace};

use super::copy_mishaps::damage_largest_pack;
use super::pools::World;
use crate::program::stderr;

#[test]
fn a_machine_is_restored_to_its_pool() {
    let world = World::with_storage_at(SrPlace::OnSlave);
    world.back_up(&[]);
    let address = world.address();
    let (kind, message) = world.fails(1, &["export", "web1", &address]);
    assert!(message.contains("has this machine: web1"), "{message}");
    assert_eq!(kind, "exists");
    let report = world.report(&["export", "web1", &address, "--new-identity", "--name", "again"]);
    let uuid = report["uuid"].as_str().unwrap();
    for device in ["xvda", "xvdb"] {
        let [old, new] = [&world.vm[..], uuid].map(|vm| world.pool.disk_bytes(vm, device));
        // A pool allocates space in blocks of 2 MiB.
        let (same, more) = new.split_at(old.len());
        assert!(old == same && more.iter().all(|byte| *byte == 0), "{device}");
    }
    assert_eq!(world.pool.tasks(), []);
    // The pool reports the error, and the message of the pool is printed.
    world.pool.faults().once(Fault::TransferFails(vec![
        "SR_BACKEND_FAILURE_44".to_owned(),
        "full".to_owned(),
    ]));
    let (kind, message) = world.fails(1, &["export", "web1", &address, "--new-identity"]);
    assert!(message.contains("not enough space"), "{message}");
    assert_eq!(kind, "no-space");
    let (_, message) = world.fails(1, &["export", "web1", &format!("{address}/nowhere"), "--new-identity"]);
    assert!(
        message.contains("no storage repository") && message.contains("nowhere"),
        "{message}"
    );

    // If the repository is damaged, nothing is left in the pool either.
    damage_largest_pack(&world.rig, "repo");
    let vms = world.pool.vms().len();
    world.fails(5, &["export", "web1", &address, "--new-identity"]);
    assert_eq!((world.pool.vms().len(), world.pool.session_count()), (vms, 0));
    assert_eq!(world.pool.tasks(), []);
}

#[test]
fn a_network_card_in_another_network_is_warned_about() {
    let world = World::new();
    world.back_up(&[]);
    let address = world.address();
    let export = ["export", "web1", &address, "--new-identity"];
    let text = |world: &World| stderr(&world.run(&export));
    assert!(!text(&world).contains("network"), "{}", text(&world));
    let network = world.pool.network();
    world.pool.set_field("network", &network, "name_label", "lan".into());
    let by_bridge = text(&world);
    assert!(
        by_bridge.contains("no network \"Pool-wide") && by_bridge.contains("card 0 is in \"lan\" now"),
        "{by_bridge}"
    );
    world.pool.set_field("network", &network, "bridge", "xenbr7".into());
    let new = text(&world);
    assert!(new.contains("has made one for network card 0"), "{new}");
}
