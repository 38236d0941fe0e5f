//! A monitor that fails at each of the commands of a run: the machine keeps running, and no leftovers of the run
//! remain.

use std::sync::atomic::{AtomicU32, Ordering};

use holdfast_host::qemu::memory::end_sending;
use holdfast_host::qemu::{PausePolicy, PointInTime, remove_run, runs_in};
use holdfast_host::qmp::{Monitor, MonitorError, QmpCommand, Result};
use serde_json::Value;

use holdfast_host::qemu::memory::{MemoryMode, MemoryPipe, MemoryReceiver};

use crate::memory::taken_in;
use holdfast_test_kit::assert_served;
use holdfast_test_kit::qemu::{DISK_BYTES, QemuLab};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    /// QEMU refuses the command.
    Refused,
    /// QEMU executes the command, and the answer is lost.
    AnswerLost,
    /// All commands from there on fail: the process is dead.
    Dead,
}

pub(crate) struct Faulty<'a> {
    inner: &'a dyn Monitor,
    fault: Fault,
    left: AtomicU32,
}

impl<'a> Faulty<'a> {
    /// A monitor whose command number `at` fails.
    pub(crate) fn new(inner: &'a dyn Monitor, fault: Fault, at: u32) -> Self {
        Self {
            inner,
            fault,
            left: AtomicU32::new(at),
        }
    }
}

impl Monitor for Faulty<'_> {
    fn execute(&self, command: &QmpCommand) -> Result<Value> {
        let left = self.left.load(Ordering::Relaxed);
        self.left.store(left.saturating_sub(1), Ordering::Relaxed);
        let name = || command.name.to_owned();
        match (left, self.fault) {
            (1, Fault::Refused) => Err(MonitorError::Refused {
                command: name(),
                class: "GenericError".to_owned(),
                description: "not today".to_owned(),
            }),
            (1, Fault::AnswerLost) => {
                self.inner.execute(command)?;
                Err(MonitorError::TimedOut {
                    command: name(),
                    after: command.deadline,
                })
            }
            (0, Fault::Dead) => Err(MonitorError::Gone {
                during: name(),
                source: None,
            }),
            // A process may die after its last command was executed.
            _ => {
                let answer = self.inner.execute(command);
                if left == 1 {
                    self.left.store(0, Ordering::Relaxed);
                } else if left == 0 {
                    self.left.store(u32::MAX, Ordering::Relaxed);
                }
                answer
            }
        }
    }
}

#[test]
fn a_fault_at_any_command_is_harmless() {
    assert_harmless(&["qcow2", "raw"], PausePolicy::Always, &|_| None);
}

#[test]
fn a_fault_at_any_command_is_harmless_with_several_disks_and_no_pause() {
    assert_harmless(&["qcow2", "raw"], PausePolicy::WhereNeeded, &|_| None);
}

#[test]
fn a_fault_at_any_command_is_harmless_in_a_running_machine() {
    assert_harmless(&["qcow2"], PausePolicy::WhereNeeded, &|_| None);
}

#[test]
fn a_fault_at_any_command_is_harmless_while_memory_is_saved() {
    assert_harmless(&["qcow2", "raw"], PausePolicy::WhereNeeded, &|receiving| {
        let (pipe, received) = taken_in();
        *receiving = Some(received);
        Some((pipe, MemoryMode::Live))
    });
}

/// The state of the machine after the last of its memory was sent: QEMU updates it asynchronously.
fn settled_status(lab: &QemuLab) -> String {
    loop {
        let answer = lab.execute("query-status", Value::Null);
        match answer["status"].as_str().unwrap() {
            "finish-migrate" => std::thread::yield_now(),
            status => return status.to_owned(),
        }
    }
}

/// Adds memory to a request; the receiver is kept until the end.
type TakeMemory = dyn Fn(&mut Option<MemoryReceiver>) -> Option<(MemoryPipe, MemoryMode)>;

fn assert_harmless(formats: &[&str], pause_policy: PausePolicy, memory: &TakeMemory) {
    let lab = QemuLab::new(formats);
    let before = lab.everything();
    for fault in [Fault::Refused, Fault::AnswerLost, Fault::Dead] {
        for at in 1.. {
            let (mut request, socket) = lab.request(lab.directory.path());
            let mut receiving = None;
            request.memory = memory(&mut receiving);
            request.pause_policy = pause_policy;
            let run = request.run;
            let monitor = Faulty::new(&*lab.monitor, fault, at);
            let case = format!("{fault:?} at command {at}");
            let made = PointInTime::make(&monitor, &lab.clock, request, &mut |_| ());
            if fault != Fault::Dead {
                assert!(lab.is_running(), "{case}");
            }
            let is_over = made.is_ok();
            if let Ok(cut) = made {
                // The fault was not reached: the frozen disks are correct.
                for (disk, export) in cut.exports.iter().enumerate() {
                    assert_served(&socket, export, disk + 1, 0, DISK_BYTES);
                }
                cut.release(&*lab.monitor, &lab.clock).unwrap();
            } else if fault == Fault::Dead {
                // The next client finds the run by its objects, and cleans up. If the memory was sent and only files
                // are left, the machine looks as if its owner had paused it: then the note of the run, written before,
                // identifies it.
                let status = settled_status(&lab);
                assert!(
                    status == "running" || status == "postmigrate" || runs_in(&*lab.monitor).unwrap() == [run].into(),
                    "{case}: {status}"
                );
                end_sending(&*lab.monitor, &lab.clock, run).unwrap();
                lab.execute("cont", Value::Null);
                remove_run(&*lab.monitor, &lab.clock, run).unwrap();
            }
            assert_eq!(lab.everything(), before, "{case}");
            if is_over {
                assert!(at > 7, "{case}: a run has fewer commands than expected");
                break;
            }
        }
    }
}
