//! `migrate qmp:PATH` while one of the processes that take part is killed at a random moment.

use std::process::{Child, Stdio};
use std::time::Duration;

use holdfast_block::{Clock as _, SystemClock};
use holdfast_host::qmp::{Monitor as _, QmpCommand, QmpSocket};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use super::bare::BareHosts;
use super::kills::{KILL_COUNT, processes};
use crate::host::text;
use crate::schedules::wait_until;

/// A process that takes part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Victim {
    /// `holdfast migrate`.
    Driver,
    /// The same, as soon as the machine is stopped.
    DriverAtStop,
    /// `holdfast receive-migration`, for requests, the memory or the disk.
    Receivers,
    /// The QEMU at the other host.
    GuestThere,
}

impl Victim {
    const ALL: [Self; 4] = [Self::Driver, Self::Receivers, Self::GuestThere, Self::DriverAtStop];
}

/// A machine that moves from one host to the other and back.
struct MovingMachine {
    hosts: BareHosts,
    /// Where it runs.
    at: usize,
}

impl MovingMachine {
    fn new() -> Option<Self> {
        Some(Self {
            hosts: BareHosts::new(&[])?,
            at: 0,
        })
    }

    fn begin(&self) -> Child {
        let words = self.words();
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let mut command = self.hosts.rig.command(&words);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().unwrap()
    }

    fn words(&self) -> Vec<String> {
        let receiver = self.hosts.receiver_of(1 - self.at);
        self.hosts.words(&receiver, &[])
    }

    /// The QEMUs of the machine.
    fn guests(&self) -> Vec<u32> {
        self.processes_with("-name", "qemu-system-x86_64")
    }

    /// The processes of a program with this argument, which name the folder of this machine.
    fn processes_with(&self, argument: &str, program: &str) -> Vec<u32> {
        let folder = text(&self.hosts.rig.path("run")).to_owned();
        let found = processes().into_iter().filter(|process| {
            let words = &process.arguments;
            words.first().is_some_and(|word| word.ends_with(program))
                && words.iter().any(|word| word == argument)
                && words.iter().any(|word| word.contains(&folder))
        });
        found.map(|process| process.id).collect()
    }

    /// Waits until the machine that moves is stopped, or the command has ended.
    fn wait_for_stop(&self, driver: &mut Child) {
        let folder = ["run", "run-there"][self.at];
        let monitor = QmpSocket::connect(&self.hosts.rig.path(folder).join("test.qmp")).unwrap();
        let status = QmpCommand::new("query-status", Value::Null);
        while driver.try_wait().unwrap().is_none() {
            if monitor.execute(&status).is_ok_and(|status| status["running"] == false) {
                return;
            }
        }
    }

    /// Kills processes with signal 9. Returns how many existed at this moment.
    fn kill(&self, victim: Victim, driver: &Child, guests_before: &[u32]) -> usize {
        let mut victims = match victim {
            Victim::Driver | Victim::DriverAtStop => vec![driver.id()],
            Victim::Receivers => self.processes_with("receive-migration", "holdfast"),
            Victim::GuestThere => self.guests(),
        };
        victims.retain(|id| !guests_before.contains(id));
        for id in &victims {
            // It may have ended since.
            kill_process(Pid::from_raw(i32::try_from(*id).unwrap()).unwrap(), Signal::KILL).ok();
        }
        victims.len()
    }

    /// The same command completes the move.
    fn complete(&self) {
        wait_until("its guest there has ended, or runs, and no guest is held", || {
            self.assert_not_at_both();
            let statuses = self.hosts.statuses();
            statuses[1 - self.at] != "paused" && statuses[self.at] != "finish-migrate"
        });
        let words = self.words();
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let again = self.hosts.rig.run(&words);
        self.assert_not_at_both();
        let text = String::from_utf8_lossy(&again.stderr).into_owned();
        assert!(again.status.success() || text.contains("has no machine"), "{text}");
    }

    fn assert_not_at_both(&self) {
        let statuses = self.hosts.statuses();
        assert!(statuses.iter().any(|status| status != "running"), "{statuses:?}");
    }

    /// It runs at one host, and has ended at the other one.
    fn assert_one_owner(&self) {
        let mut statuses = self.hosts.statuses();
        statuses.sort();
        assert_eq!(statuses, ["absent", "running"]);
    }
}

#[test]
#[ignore = "tens of migrations: make torture"]
fn a_qemu_runs_on_one_host_after_any_kill() {
    let Some(mut machine) = MovingMachine::new() else {
        return;
    };
    let clock = SystemClock::new();
    let count = std::env::var("HOLDFAST_KILLS").map_or(KILL_COUNT, |text| text.parse().unwrap());
    let seed = std::env::var("HOLDFAST_SEED").map_or(1, |text| text.parse::<u64>().unwrap());
    let mut random = seed.wrapping_mul(0x2545_f491_4f6c_dd1d);
    let mut found = 0;
    for number in 0..count {
        random = random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        let victim = Victim::ALL[number as usize % Victim::ALL.len()];
        // A migration without a kill takes 0.6 to 3 seconds.
        let delay = Duration::from_millis(100 + (random >> 33) % 1000);
        let guests_before = machine.guests();
        let boot = machine.hosts.console.last().unwrap().boot;
        let mut driver = machine.begin();
        if victim == Victim::DriverAtStop {
            machine.wait_for_stop(&mut driver);
        } else {
            clock.sleep(delay);
        }
        let killed_count = machine.kill(victim, &driver, &guests_before);
        found += u32::from(killed_count > 0);
        wait_until("the command ends", || {
            machine.assert_not_at_both();
            driver.try_wait().unwrap().is_some()
        });
        let output = driver.wait_with_output().unwrap();
        println!(
            "{number}: {victim:?} at {delay:?}, {killed_count} killed, ended with {:?}: {:?}\n{}",
            output.status.code(),
            machine.hosts.statuses(),
            String::from_utf8_lossy(&output.stderr)
        );
        if victim == Victim::GuestThere && machine.guests().is_empty() {
            // It ran there already: it has crashed.
            machine = MovingMachine::new().unwrap();
            continue;
        }
        if !output.status.success() {
            machine.complete();
        }
        machine.assert_one_owner();
        machine.at = 1 - machine.at;
        machine.hosts.run_at(machine.at);
        let later = machine.hosts.console.wait_for_more(20);
        assert_eq!(later.boot, boot, "{number}: the guest has booted again");
        machine.hosts.console.assert_no_mismatch();
    }
    println!("{found} of {count} attempts had a kill");
}
