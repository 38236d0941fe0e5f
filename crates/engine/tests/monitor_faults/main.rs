//! A fault at each command of a backup in turn: the machine continues to run, no leftovers remain, and the next backup
//! is correct.
//!
//! QEMU is a model ([`holdfast_qemu_model`]) behind a real socket; everything else is the code that users run.
//! `holdfast doctor --fix` cleans up after each fault over its own connection.

#![expect(clippy::unwrap_used, reason = "all of it is test")]

mod lab;
mod scenario;

use holdfast_qemu_model::FaultKind;
use scenario::{Scenario, survives_all, survives_some};

fn first_backup() -> Scenario {
    Scenario {
        is_first: true,
        ..Scenario::default()
    }
}

fn incremental_backup() -> Scenario {
    Scenario {
        kinds: &FaultKind::ALL,
        ..Scenario::default()
    }
}

fn one_disk() -> Scenario {
    Scenario {
        disk_count: 1,
        ..Scenario::default()
    }
}

fn firmware_variables() -> Scenario {
    Scenario {
        has_nvram: true,
        ..Scenario::default()
    }
}

fn iothreads() -> Scenario {
    Scenario {
        has_iothread: true,
        ..Scenario::default()
    }
}

fn pause_method() -> Scenario {
    Scenario {
        method: Some(holdfast_engine::Method::Pause),
        ..Scenario::default()
    }
}

#[test]
fn a_first_backup_survives_faults() {
    survives_some(&first_backup());
}

#[test]
fn an_incremental_backup_survives_faults() {
    survives_some(&incremental_backup());
}

#[test]
fn a_backup_of_one_disk_survives_faults() {
    survives_some(&one_disk());
}

#[test]
fn a_backup_of_firmware_variables_survives_faults() {
    survives_some(&firmware_variables());
}

#[test]
fn a_backup_of_iothreads_survives_faults() {
    survives_some(&iothreads());
}

#[test]
fn a_backup_with_a_pause_survives_faults() {
    survives_some(&pause_method());
}

#[test]
#[ignore = "ten minutes: make torture"]
fn every_backup_survives_a_fault_at_every_command() {
    survives_all(&first_backup());
    survives_all(&incremental_backup());
    survives_all(&one_disk());
    survives_all(&firmware_variables());
    survives_all(&iothreads());
    survives_all(&pause_method());
}
