//! Something goes wrong at each command of a backup in turn: the machine runs on, nothing is left of the backup, and the next one is right.
//!
//! QEMU is a model ([`holdfast_qemu_model`]) behind a real socket; all else is the code that users run. `holdfast doctor --fix` clears up
//! after each fault over a connection of its own.

#![expect(clippy::unwrap_used, reason = "all of it is test")]

mod lab;
mod scenario;

use holdfast_qemu_model::FaultKind;
use scenario::{Scenario, survives_all};

#[test]
fn a_first_backup_of_two_disks() {
    survives_all(&Scenario {
        is_first: true,
        ..Scenario::default()
    });
}

#[test]
fn an_incremental_backup_of_two_disks() {
    survives_all(&Scenario {
        kinds: &FaultKind::ALL,
        ..Scenario::default()
    });
}

#[test]
fn an_incremental_backup_of_one_disk() {
    survives_all(&Scenario {
        disk_count: 1,
        ..Scenario::default()
    });
}

#[test]
fn a_backup_that_pauses_for_the_variables_of_the_firmware() {
    survives_all(&Scenario {
        has_nvram: true,
        ..Scenario::default()
    });
}

#[test]
fn a_backup_of_disks_in_iothreads() {
    survives_all(&Scenario {
        has_iothread: true,
        ..Scenario::default()
    });
}

#[test]
fn a_backup_while_the_machine_is_paused() {
    survives_all(&Scenario {
        method: Some(holdfast_engine::Method::Pause),
        ..Scenario::default()
    });
}
