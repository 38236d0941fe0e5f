//! `migrate` while one of the processes that take part is killed at a random moment.

use std::process::{Child, Stdio};
use std::time::Duration;

use holdfast_block::Clock as _;
use holdfast_test_kit::file_systems::system;
use rustix::process::{Pid, Signal, kill_process};

use super::{TwoHosts, process_of};
use crate::replication::sshd::{Program, Sshd};
use crate::schedules::wait_until;

/// Number of kills, unless `HOLDFAST_KILLS` is set.
pub(super) const KILL_COUNT: u32 = 40;

/// A process that takes part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Victim {
    /// `holdfast migrate`.
    Driver,
    /// `holdfast receive-disk` at the other host, or `receive-migration` for a disk that is pulled.
    Receiver,
    /// `holdfast receive-machine` at the other host.
    Agent,
    /// The sshd of the connection.
    Connection,
    DaemonHere,
    DaemonThere,
    /// The QEMU of the machine at the other host.
    GuestThere,
}

const VICTIMS: [Victim; 7] = [
    Victim::Driver,
    Victim::Receiver,
    Victim::Agent,
    Victim::Connection,
    Victim::DaemonHere,
    Victim::DaemonThere,
    Victim::GuestThere,
];

/// A process, by the kernel.
pub(super) struct Process {
    pub(super) id: u32,
    parent: u32,
    pub(super) arguments: Vec<String>,
}

pub(super) fn processes() -> Vec<Process> {
    let entries = std::fs::read_dir("/proc").unwrap().flatten();
    let ids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let process = |id: u32| {
        let stat = std::fs::read_to_string(format!("/proc/{id}/stat")).ok()?;
        let parent = stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()?;
        let line = std::fs::read(format!("/proc/{id}/cmdline")).ok()?;
        let words = line
            .split(|byte| *byte == 0)
            .map(|word| String::from_utf8_lossy(word).into_owned());
        Some(Process {
            id,
            parent,
            arguments: words.collect(),
        })
    };
    ids.filter_map(process).collect()
}

/// The processes that a process has started, and those that these have started.
fn descendants(of: u32, all: &[Process]) -> Vec<&Process> {
    let mut found: Vec<&Process> = Vec::new();
    let mut parents = vec![of];
    while let Some(parent) = parents.pop() {
        let children = all.iter().filter(|process| process.parent == parent);
        for child in children {
            parents.push(child.id);
            found.push(child);
        }
    }
    found
}

/// The QEMUs of a machine.
fn guests(uuid: &str, all: &[Process]) -> Vec<u32> {
    let of_machine = all
        .iter()
        .filter(|process| process.arguments.iter().any(|word| word == uuid));
    of_machine.map(|process| process.id).collect()
}

/// A migration that is under way.
struct Attempt<'a> {
    driver: Child,
    uuid: &'a str,
    /// The QEMUs of the machine when it began.
    guests_before: Vec<u32>,
}

impl TwoHosts {
    /// Kills a process with signal 9. Returns whether it exists at this moment.
    fn kill(&mut self, victim: Victim, attempt: &Attempt<'_>) -> bool {
        let all = processes();
        let at_sshd = descendants(self.sshd.process_id(), &all);
        let called = |word: &'static str| {
            move |process: &&&Process| {
                process.arguments.first().is_some_and(|name| name.ends_with("holdfast"))
                    && process.arguments.iter().any(|other| other == word)
            }
        };
        let found: Vec<u32> = match victim {
            Victim::Driver => vec![attempt.driver.id()],
            Victim::Receiver => at_sshd
                .iter()
                .filter(|process| {
                    ["receive-disk", "receive-migration"]
                        .iter()
                        .any(|word| called(word)(process))
                })
                .map(|process| process.id)
                .collect(),
            Victim::Agent => at_sshd
                .iter()
                .filter(called("receive-machine"))
                .map(|process| process.id)
                .collect(),
            Victim::Connection => {
                let of_ssh = at_sshd
                    .iter()
                    .filter(|process| process.arguments[0].starts_with("sshd"));
                of_ssh.map(|process| process.id).collect()
            }
            Victim::DaemonHere => {
                self.here.kill_daemon();
                return true;
            }
            Victim::DaemonThere => {
                self.there.kill_daemon();
                return true;
            }
            Victim::GuestThere => {
                let guests = guests(attempt.uuid, &all).into_iter();
                guests.filter(|id| !attempt.guests_before.contains(id)).collect()
            }
        };
        for id in &found {
            let id = i32::try_from(*id).ok().and_then(Pid::from_raw).unwrap();
            // It may have ended since.
            kill_process(id, Signal::KILL).ok();
        }
        !found.is_empty()
    }

    /// Starts a daemon that was killed, and connects to it.
    fn revive(mut self, victim: Victim) -> Self {
        match victim {
            Victim::DaemonHere => {
                self.here.start_daemon();
                self.here.connect();
                self.rig.see_files_of(process_of(&self.here));
            }
            Victim::DaemonThere => {
                self.there.start_daemon();
                self.there.connect();
            }
            _ => return self,
        }
        self.sshd = Sshd::start_inside(process_of(&self.there), Program::Found).unwrap();
        self
    }
}

#[test]
#[ignore = "tens of migrations: make torture"]
fn a_machine_runs_on_one_host_after_any_kill() {
    let kept = ReactionToKills {
        meanwhile: |_| {},
        afterwards: |_| {},
    };
    kill_at_random(&[], &kept);
}

#[test]
#[ignore = "tens of migrations: make torture"]
fn a_machine_whose_disks_follow_it_is_completed_after_any_kill() {
    let completed = ReactionToKills {
        meanwhile: start_there,
        afterwards: complete_there,
    };
    kill_at_random(&["--post-copy"], &completed);
}

/// What an administrator does.
struct ReactionToKills {
    /// While the command runs.
    meanwhile: fn(&TwoHosts),
    /// When it has ended.
    afterwards: fn(&TwoHosts),
}

/// Continues a pull. A machine that was ended there is started while its disks are served.
fn complete_there(hosts: &TwoHosts) {
    if hosts.states()[0] != "shut off" || hosts.states()[1] == "absent" {
        return;
    }
    let words = hosts.words(&["--accept-incomplete-memory", "--delete-former"]);
    let mut command = hosts.rig.command(&words.iter().map(String::as_str).collect::<Vec<_>>());
    let mut driver = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    wait_for_end(&mut driver, || start_there(hosts));
    let output = driver.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    // It was complete before, if the command was killed at its end.
    assert!(output.status.success() || text.contains("exists there"), "{text}");
    let text = hosts.there.virsh(&["dumpxml", "web1"]);
    assert!(!text.contains("nbd"), "{text}");
}

/// The disks of a machine that was ended there are completed when it runs.
fn start_there(hosts: &TwoHosts) {
    if hosts.states() == ["shut off", "shut off"] {
        system("virsh", &["-q", "-c", &hosts.there.uri(), "start", "web1"]).ok();
    }
}

fn wait_for_end(driver: &mut Child, help: impl Fn()) {
    wait_until("the command ends", || {
        help();
        driver.try_wait().unwrap().is_some()
    });
}

/// Migrates the machine, kills what takes part, and lets `complete` continue what was interrupted.
#[expect(
    clippy::print_stdout,
    reason = "the seed and the moments are needed to repeat a failure"
)]
fn kill_at_random(options: &[&str], reaction: &ReactionToKills) {
    let Some(mut hosts) = TwoHosts::new() else { return };
    let uuid = hosts.here.virsh(&["domuuid", "web1"]).trim().to_owned();
    let count = std::env::var("HOLDFAST_KILLS").map_or(KILL_COUNT, |text| text.parse().unwrap());
    let seed = std::env::var("HOLDFAST_SEED").map_or(1, |text| text.parse::<u64>().unwrap());
    let mut random = seed.wrapping_mul(0x2545_f491_4f6c_dd1d);
    let (mut moved, mut found) = (0, 0);
    for number in 0..count {
        random = random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        let victim = VICTIMS[number as usize % VICTIMS.len()];
        // A migration without a kill takes 1.5 to 3 seconds.
        let delay = Duration::from_millis(200 + (random >> 33) % 2000);
        let usual = ["--max-frozen", "20s", "--delete-former"];
        let words = ["--accept-incomplete-memory", "--retry-for", "5s"];
        let words = hosts.words(&[&words, &usual[..], options].concat());
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let guests_before = guests(&uuid, &processes());
        let mut command = hosts.rig.command(&words);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let attempt = Attempt {
            driver: command.spawn().unwrap(),
            uuid: &uuid,
            guests_before,
        };
        hosts.here.clock.sleep(delay);
        let is_found = hosts.kill(victim, &attempt);
        found += u32::from(is_found);
        hosts.here.clock.sleep(Duration::from_millis(500));
        hosts = hosts.revive(victim);
        let mut driver = attempt.driver;
        wait_for_end(&mut driver, || (reaction.meanwhile)(&hosts));
        let output = driver.wait_with_output().unwrap();
        println!(
            "{number}: {victim:?} at {delay:?}, found: {is_found}, ended with {:?}: {:?}\n{}",
            output.status.code(),
            hosts.states(),
            String::from_utf8_lossy(&output.stderr)
        );
        (reaction.afterwards)(&hosts);
        if victim == Victim::GuestThere && hosts.states().iter().all(|state| state != "running") {
            // It ran there already, and was ended as by a crash.
            hosts.there.virsh(&["start", "web1"]);
        }
        wait_until("the machine runs on one host", || {
            hosts.states().iter().filter(|state| *state == "running").count() == 1
        });
        hosts.console.wait_for_more(20);
        hosts.console.assert_no_mismatch();
        // Nothing of the attempt prevents the next one, or the same command from succeeding.
        if hosts.states()[0] == "running" {
            hosts.moved(&[&usual[..], options].concat());
        } else {
            moved += 1;
        }
        assert_eq!(hosts.states(), ["shut off", "running"], "{number}");
        hosts = hosts.turned();
    }
    println!("{found} processes were killed; {moved} of {count} attempts moved the machine");
}
