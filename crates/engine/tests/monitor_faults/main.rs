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
fn first_backup_survives() {
    survives_some(&first_backup());
}

#[test]
fn incremental_backup_survives() {
    survives_some(&incremental_backup());
}

#[test]
fn one_disk_survives() {
    survives_some(&one_disk());
}

#[test]
fn firmware_variables_survives() {
    survives_some(&firmware_variables());
}

#[test]
fn iothreads_survives() {
    survives_some(&iothreads());
}

#[test]
fn pause_method_survives() {
    survives_some(&pause_method());
}

#[test]
#[ignore = "ten minutes: make torture"]
fn a_fault_at_every_command() {
    survives_all(&first_backup());
    survives_all(&incremental_backup());
    survives_all(&one_disk());
    survives_all(&firmware_variables());
    survives_all(&iothreads());
    survives_all(&pause_method());
}
