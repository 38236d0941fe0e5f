//! A backup is killed at any moment: the watchdog resumes the machine and cleans up, and the next backup is correct.

use std::time::Duration;

use holdfast_block::{Clock as _, SeededRandom, SystemClock};
use holdfast_host::MachineState;
use holdfast_host::qemu::runs_in;
use rustix::process::{Pid, Signal, kill_process};

use super::{World, at};

const KILLS: usize = 12;
/// How long the watchdog may take.
const PATIENCE: Duration = Duration::from_secs(20);

#[test]
fn a_backup_killed_at_any_moment_leaves_a_clean_running_machine() {
    let mut world = World::new();
    let clock = SystemClock::new();
    let mut random = SeededRandom::new(1);
    let start = clock.now();
    world.back_up();
    let whole_us = u64::try_from(clock.now().saturating_sub(start).as_micros()).unwrap();
    let uri = world.lab.uri();
    for round in 0..KILLS {
        let byte = u8::try_from(100 + round).unwrap();
        world.write(round % 2, byte, 65_536 * round, 65_536);
        let mut child = world.rig.command(&at(&uri, &["backup", "web1"])).spawn().unwrap();
        clock.sleep(Duration::from_micros(random.below(whole_us)));
        kill_process(Pid::from_child(&child), Signal::KILL).unwrap();
        child.wait().unwrap();
        let dead_since = clock.now();
        let machine = world.machine();
        loop {
            let state = machine.describe().unwrap().summary.state;
            let left = runs_in(machine.monitor()).unwrap();
            if state == MachineState::Running && left.is_empty() {
                break;
            }
            let waited = clock.now().saturating_sub(dead_since);
            assert!(waited < PATIENCE, "round {round}: {state}, {left:?} after {waited:?}");
            clock.sleep(Duration::from_millis(50));
        }
        if round % 4 == 3 {
            world.back_up();
            world.assert_snapshot_is_right(&format!("round {round}"));
        }
    }
    world.rig.ok(&["verify"]);
    // The next successful backup removes the bitmaps of killed runs.
    world.back_up();
    for disk in holdfast_host::qemu::disks(world.machine().monitor()).unwrap() {
        assert_eq!(disk.bitmaps.len(), 1, "{:?}", disk.bitmaps);
    }
}
