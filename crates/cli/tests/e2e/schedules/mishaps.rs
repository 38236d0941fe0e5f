//! Jobs that fail or hang, daemons that are killed, and full disks.

use std::time::Duration;

use holdfast_block::{Clock as _, SystemClock};
use rustix::process::{Pid, Signal, kill_process_group};

use super::{Host, at_home, wait_until};
use crate::host::small_file_system;
use crate::rig::assert_code;

/// A repository whose password command is `password`.
const SEALED: &str = r#"
[repositories.sealed]
path = "{here}/sealed"
password_command = "{here}/bin/password"
[jobs.sealed]
do = "backup"
repository = "sealed"
images = ["{here}/a.raw"]
when = "*-01-01"
retry_delay = "1s"
"#;

fn sealed(more: &str) -> Host {
    let host = Host::new(&format!("{SEALED}{more}"));
    host.rig.write("words", b"four horses eat soup\n");
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o600);
    std::fs::set_permissions(host.rig.path("words"), mode).unwrap();
    host.rig.ok(&["init", "-r", "sealed", "--password-file", "words"]);
    host
}

/// Sets up a job that was due in January and has not run since.
fn missed(host: &Host) {
    let record = r#"{"schema":1,"seen":"2020-12-01T00:00:00Z","failed_count":0,"silent":{}}"#;
    host.rig.write("state/jobs/sealed.json", record.as_bytes());
}

fn is_alive(process: &str) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", process.trim())).unwrap_or_default();
    stat.rsplit(')')
        .next()
        .is_some_and(|rest| !rest.is_empty() && !rest.starts_with(" Z"))
}

/// The process group of a process.
fn group_of(process: &str) -> Pid {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", process.trim())).unwrap();
    let group = stat.rsplit(')').next().unwrap().split_whitespace().nth(2).unwrap();
    Pid::from_raw(group.parse().unwrap()).unwrap()
}

#[test]
fn failed_jobs_are_retried_and_missed_ones_run_once() {
    let host = sealed("");
    missed(&host);
    host.program(
        "password",
        "echo x >> {here}/asked\n[ $(wc -l < {here}/asked) -ge 3 ] && cat {here}/words",
    );
    let daemon = host.start(&[]);
    host.wait_for("sealed", &["failed", "failed", "done"]);
    let runs = host.journal("run");
    assert_eq!(
        (&runs[0]["failed_before"], &runs[2]["failed_before"]),
        (&0.into(), &2.into())
    );
    assert!(
        runs[0]["error"]
            .as_str()
            .unwrap()
            .contains("the password command failed"),
        "{}",
        runs[0]
    );
    assert!(runs[0]["retry_at"].is_string() && runs[2]["retry_at"].is_null());
    daemon.kill();
    // There are no further missed runs.
    let again = host.rig.report(&at_home(&["run", "--due"]));
    assert_eq!(again["runs"].as_array().unwrap().len(), 0);
}

#[test]
fn a_hanging_job_is_killed_with_its_children() {
    let host = sealed("timeout = \"2s\"\nretries = 0\n");
    missed(&host);
    host.program(
        "password",
        "trap '' TERM\necho $$ > {here}/hanging\nwhile :; do sleep 1; done",
    );
    let daemon = host.start(&[]);
    host.wait_for("sealed", &["timed-out"]);
    let hanging = String::from_utf8(host.rig.read("hanging")).unwrap();
    wait_until("its end", || !is_alive(&hanging));
    // Other jobs can run.
    let words = at_home(&["run", "sealed"]);
    host.program("password", "cat {here}/words");
    assert_code(&host.rig.run(&words), 0, &words);
    assert_eq!(daemon.stop(), Some(0));
}

/// When the daemon is killed, its job continues, and is not started a second time.
#[test]
fn a_killed_daemon_loses_no_job_and_repeats_none() {
    let host = sealed("");
    missed(&host);
    host.program(
        "password",
        "[ -e {here}/hanging ] && exec cat {here}/words\necho $PPID > {here}/hanging.new\nmv {here}/hanging.new {here}/hanging\nexec sleep 1000",
    );
    let daemon = host.start(&[]);
    wait_until("the job's start", || host.rig.path("hanging").exists());
    daemon.kill();
    let orphan = String::from_utf8(host.rig.read("hanging")).unwrap();
    assert!(is_alive(&orphan));

    let words = at_home(&["run", "sealed"]);
    assert_code(&host.rig.run(&words), 4, &words);
    let daemon = host.start(&[]);
    SystemClock::new().sleep(Duration::from_secs(1));
    assert!(host.outcomes("sealed").is_empty() && is_alive(&orphan));

    kill_process_group(group_of(&orphan), Signal::KILL).unwrap();
    host.wait_for("sealed", &["unseen", "done"]);
    assert_eq!(daemon.stop(), Some(0));
}

#[test]
fn a_stopped_daemon_ends_its_jobs_and_runs_them_later() {
    let host = sealed("");
    missed(&host);
    host.program("password", "echo $$ > {here}/hanging\nexec sleep 1000");
    let daemon = host.start(&[]);
    wait_until("the job's start", || host.rig.path("hanging").exists());
    assert_eq!(daemon.stop(), Some(0));
    assert_eq!(host.outcomes("sealed"), ["stopped"]);
    let hanging = String::from_utf8(host.rig.read("hanging")).unwrap();
    wait_until("its end", || !is_alive(&hanging));
    host.program("password", "cat {here}/words");
    let daemon = host.start(&[]);
    host.wait_for("sealed", &["stopped", "done"]);
    assert_eq!(daemon.stop(), Some(0));
}

#[test]
fn a_full_journal_disk_stops_no_job_and_loses_no_entry() {
    let host = Host::new(
        "[jobs.often]\ndo = \"backup\"\nrepository = \"main\"\nimages = [\"{here}/a.raw\"]\nwhen = \"*:*:0/1\"\n",
    );
    // The state that the creation of the repository left.
    std::fs::remove_dir_all(host.rig.path("state")).unwrap();
    let Some(small) = small_file_system(&host.rig.path("state"), 2 << 20) else {
        return;
    };
    let daemon = host.start(&[]);
    host.wait_for("often", &["done"]);
    let ballast = small.path.join("ballast");
    // Uses all space, to the last byte.
    let mut file = std::fs::File::create(&ballast).unwrap();
    while std::io::Write::write_all(&mut file, &[1; 512]).is_ok() {}
    drop(file);
    wait_until("the complaint", || host.log().contains("kept in memory"));
    let snapshots = host.rig.snapshot_count();
    wait_until("more runs", || host.rig.snapshot_count() > snapshots + 1);
    std::fs::remove_file(&ballast).unwrap();
    wait_until("what was to be written", || {
        host.log().contains("the journal can be written again, and is complete")
    });
    assert_eq!(daemon.stop(), Some(0));
    let done = host.log().matches("often completed").count();
    assert_eq!(
        host.outcomes("often")
            .iter()
            .filter(|outcome| *outcome == "done")
            .count(),
        done
    );
}
