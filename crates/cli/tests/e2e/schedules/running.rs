//! The daemon, and `run` without a daemon, when nothing fails.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::net::UnixDatagram;

use rustix::process::Signal;

use super::{Host, at_home, wait_until};
use crate::rig::assert_code;

const OFTEN: &str = r#"
[jobs.often]
do = "backup"
repository = "main"
images = ["{here}/a.raw"]
when = "*:*:0/2"
[jobs.thin]
do = "prune"
repository = "main"
keep_last = 1
when = "*:*:1/2"
[jobs.off]
do = "gc"
repository = "main"
when = "*:*:*"
enabled = false
"#;

#[test]
fn jobs_run_when_they_are_due_and_are_in_the_journal() {
    let host = Host::new(OFTEN);
    let daemon = host.start(&[]);
    host.wait_for("often", &["done", "done"]);
    host.wait_for("thin", &["done"]);

    // Only one daemon can run with the same state folder.
    let words = at_home(&["daemon"]);
    let second = host.rig.run(&words);
    assert_code(&second, 4, &words);

    assert_eq!(daemon.stop(), Some(0));
    assert!(host.outcomes("off").is_empty());
    let runs = host.rig.report(&at_home(&["runs", "--job", "often"]));
    let run = &runs["runs"][0];
    assert_eq!(
        (&run["by"], &run["kind"], &run["exit_code"]),
        (&"daemon".into(), &"backup".into(), &0.into())
    );
    let listed = host.rig.report(&["list"]);
    let id = &listed["snapshots"].as_array().unwrap().last().unwrap()["id"];
    let mut all_runs = runs["runs"].as_array().unwrap().iter().rev();
    let run_of_snapshot = all_runs.find(|run| run["snapshots"][0]["id"] == *id);
    assert_eq!(run["snapshots"][0]["machine"], "a", "{run}");
    assert!(run["read_bytes"].as_u64().unwrap() >= 20_000, "{run}");
    assert!(run["stored_bytes"].as_u64().unwrap() > 0, "{run}");
    assert!(run_of_snapshot.is_some(), "{id} {runs}");
    let shown = host.rig.ok(&at_home(&["runs"]));
    assert!(shown.contains("often") && shown.contains("19.5 KiB read"), "{shown}");
    let log = host.log();
    assert!(
        log.contains("often completed; snapshot ") && log.contains(" stored, took "),
        "{log}"
    );
    // A job that has never run is also known.
    let words = at_home(&["runs", "--job", "off"]);
    let mut command = host.rig.command(&words);
    let listed = command.env("HOLDFAST_CONFIG", host.rig.path("holdfast.toml")).output();
    assert_code(&listed.unwrap(), 0, &words);
    let jobs = host.rig.report(&at_home(&["jobs"]));
    assert_eq!(jobs["jobs"][0]["last_outcome"], "done");
    assert!(jobs["jobs"][0]["next"].is_string() && jobs["jobs"][2]["next"].is_null());
    assert!(host.rig.ok(&at_home(&["jobs"])).contains("disabled"));
}

#[test]
fn a_user_or_a_timer_runs_jobs_without_a_daemon() {
    let host = Host::new(OFTEN);
    // No daemon has run yet: the first pass only records the time.
    let first = host.rig.report(&at_home(&["run", "--due"]));
    assert_eq!(first["runs"].as_array().unwrap().len(), 0);
    wait_until("a time that is due", || {
        let report = host.rig.report(&at_home(&["run", "--due"]));
        report["runs"]
            .as_array()
            .unwrap()
            .iter()
            .any(|run| run["job"] == "often")
    });
    let by_hand = host.rig.report(&at_home(&["run", "off", "thin"]));
    assert_eq!(by_hand["runs"].as_array().unwrap().len(), 2);
    assert_eq!(host.outcomes("off"), ["done"]);

    let (kind, text) = host.rig.error(1, &at_home(&["run", "nonsense"]));
    assert_eq!(kind, "not-found");
    assert!(text.contains("there is no job nonsense"), "{text}");
}

#[test]
fn systemd_is_notified_of_the_state_of_the_service() {
    let host = Host::new(OFTEN);
    let path = host.rig.path("notify");
    let socket = UnixDatagram::bind(&path).unwrap();
    socket.set_read_timeout(Some(super::LONG)).unwrap();
    let hear = || {
        let mut bytes = [0; 1000];
        let length = socket.recv(&mut bytes).unwrap();
        String::from_utf8_lossy(&bytes[..length]).into_owned()
    };
    let wait_for = |word: &str| while !hear().contains(word) {};
    let daemon = host.start(&[
        ("NOTIFY_SOCKET", path.to_str().unwrap()),
        ("WATCHDOG_USEC", "1500000"),
        ("JOURNAL_STREAM", "1:2"),
    ]);
    assert_eq!(hear(), "READY=1");
    for _ in 0..4 {
        wait_for("WATCHDOG=1");
    }
    wait_for("running: ");
    daemon.signal(Signal::HUP);
    wait_for("RELOADING=1");
    wait_for("READY=1");
    assert_eq!(daemon.stop(), Some(0));
    wait_for("STOPPING=1");
    assert!(
        host.log()
            .lines()
            .any(|line| line.starts_with("<6>often started as process ")),
        "{}",
        host.log()
    );
}

#[test]
fn a_configuration_is_reloaded_unless_it_is_invalid() {
    let host = Host::new(OFTEN);
    let daemon = host.start(&[]);
    host.wait_for("often", &["done"]);
    host.configure(&OFTEN.replace("images", "imags"));
    daemon.signal(Signal::HUP);
    wait_until("the refusal", || host.log().contains("the configuration before stays"));
    assert!(host.log().contains("did you mean images?"), "{}", host.log());
    let before = host.outcomes("often").len();
    wait_until("another run by the old one", || {
        host.outcomes("often").len() > before + 1
    });
    host.configure(&OFTEN.replace("[jobs.often]", "[jobs.other]"));
    daemon.signal(Signal::HUP);
    host.wait_for("other", &["done"]);
    assert_eq!(daemon.stop(), Some(0));
}

/// Reads the text format of Prometheus strictly; each series with its value.
fn series(text: &str) -> BTreeMap<String, f64> {
    let is_name = |name: &str| !name.is_empty() && name.chars().all(|c| c.is_ascii_lowercase() || c == '_');
    let mut all = BTreeMap::new();
    let mut families = BTreeSet::new();
    let mut lines = text.lines().peekable();
    while let Some(help) = lines.next() {
        let (name, words) = help.strip_prefix("# HELP ").unwrap().split_once(' ').unwrap();
        assert!(is_name(name) && !words.is_empty() && families.insert(name), "{help}");
        assert_eq!(lines.next(), Some(&format!("# TYPE {name} gauge")[..]));
        let mut sample_count = 0;
        while let Some(line) = lines.next_if(|line| !line.starts_with('#')) {
            let (one, value) = line.rsplit_once(' ').unwrap();
            let labels = one.strip_prefix(name).unwrap();
            if !labels.is_empty() {
                let inner = labels
                    .strip_prefix('{')
                    .and_then(|rest| rest.strip_suffix("\"}"))
                    .unwrap();
                for pair in inner.split("\",") {
                    let (label, value) = pair.split_once("=\"").unwrap();
                    assert!(is_name(label) && !value.contains(['"', '\\']), "{line}");
                }
            }
            assert!(
                all.insert(one.to_owned(), value.parse().unwrap()).is_none(),
                "twice: {one}"
            );
            sample_count += 1;
        }
        assert!(sample_count > 0, "{name} has no sample");
    }
    all
}

/// Whether a sample is this whole number.
fn is_count(sample: f64, expected: u32) -> bool {
    (sample - f64::from(expected)).abs() < 0.5
}

#[test]
fn jobs_machines_and_the_repository_have_metrics() {
    let host = Host::new(OFTEN);
    host.rig.ok(&at_home(&["run", "often", "thin"]));
    host.rig.ok(&["backup", "--machine", "b", "a.raw"]);
    let of_jobs = series(&host.rig.ok(&at_home(&["monitor", "metrics"])));
    let job = |name: &str, more: &str| of_jobs[&format!("holdfast_job_{name}{{job=\"often\",kind=\"backup\"{more}}}")];
    assert_eq!((job("enabled", ""), job("running", "")), (1.0, 0.0));
    assert!(is_count(job("last_outcome", ",outcome=\"done\""), 1));
    assert!(is_count(job("last_outcome", ",outcome=\"failed\""), 0));
    assert!(is_count(job("last_exit_code", ""), 0));
    assert!(job("last_read_bytes", "") >= 20_000.0 && job("last_stored_bytes", "") > 0.0);
    assert!(job("last_success_timestamp_seconds", "") >= job("last_start_timestamp_seconds", ""));
    assert!(job("last_duration_seconds", "") > 0.0);
    assert!(job("next_run_timestamp_seconds", "") > 1_700_000_000.0);
    assert!(!of_jobs.contains_key("holdfast_job_last_exit_code{job=\"off\",kind=\"gc\"}"));
    assert!(!of_jobs.keys().any(|name| name.starts_with("holdfast_repository")));

    let text = host.rig.ok(&["monitor", "metrics", "-r", "repo"]);
    let of_repository = series(&text);
    let repository = |name: &str| of_repository[&format!("holdfast_repository_{name}{{repository=\"repo\"}}")];
    let statistics = host.rig.report(&["stats"]);
    for (name, field) in [
        ("stored_bytes", "stored_bytes"),
        ("packs", "pack_count"),
        ("snapshots", "snapshot_count"),
    ] {
        assert_eq!(Some(repository(name)), statistics[field].as_f64(), "{name}");
    }
    assert_eq!(
        (repository("lost_snapshots"), repository("damaged_snapshots")),
        (0.0, 0.0)
    );
    for machine in ["a", "b"] {
        let labels = format!("{{repository=\"repo\",machine=\"{machine}\",identity=\"images\"}}");
        let of_machine = |name: &str| of_repository[&format!("holdfast_machine_{name}{labels}")];
        assert!(is_count(of_machine("snapshots"), 1));
        assert!(of_machine("last_snapshot_timestamp_seconds") > 1_700_000_000.0);
        assert!(of_machine("last_snapshot_size_bytes") >= 20_000.0);
    }
    assert!(!of_repository.keys().any(|name| name.starts_with("holdfast_job")));
}
