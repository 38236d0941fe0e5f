//! What administrators write into files, and what any user writes into a host snapshot.

use holdfast_block::hostile::Outcome;
use holdfast_policy::config::Config;
use holdfast_policy::sanoid::SanoidConfig;
use holdfast_policy::{Calendar, TimeZone, Timestamp};

use super::times;
use crate::HostSnapshotRecord;

const CALENDARS: [(&str, &str); 6] = [
    ("word", "daily"),
    ("nights", "Mon..Fri *-*-* 22,02:30:00"),
    ("last-day", "*-02~01 00:00"),
    ("steps", "2026-1/3-* 0/4:15/20:5/10"),
    ("zone", "Sun 2027-*-* 03:00 Europe/Berlin"),
    ("never", "2026-02-30 12:00"),
];
const CONFIGURATION: &str = r#"version = 1
[daemon]
jobs_at_once = 2
[repositories.main]
path = "/backup"
password_file = "/etc/key"
[pools.xen1]
address = "xen1.example.org:8443"
user = "backup"
password_command = "pass xen1"
certificate = ["5A:0B", "00:01"]
read = "vhd"
connections = 4
keep_nothing = true
[retention.standard]
keep_last = 3
keep_within = "1d"
[defaults]
repository = "main"
retries = 3
[jobs.nightly]
do = "backup"
all = true
exclude_machine = ["test-*"]
when = "02:30"
jitter = "20min"
[jobs.thin]
do = "prune"
retention = "standard"
when = ["Sat 06:00", "12:00"]
[jobs.pool]
do = "backup"
machines = ["xen://xen1/tag:nightly", "xen://ana@xen1/web1"]
[notify.admin]
by = "mail"
to = ["root"]
on = ["failure"]
"#;
const POLICY: &str = "[tank/vm]\nuse_template = production\nrecursive = yes\nprocess_children_only = no\n# comment\n\
     [tank/vm/scratch]\nautosnap = no\n[template_production]\nfrequently = 0\nhourly = 36\ndaily_hour = 23\nyearly = 0\n\
     autosnap = yes\nautoprune = yes\npre_snapshot_script = /usr/local/bin/pre\nscript_timeout = 5\n";
const RECORD: &str = r#"{"schema":1,"program":"holdfast 0.1.0","time":"2026-11-22T16:45:00.25Z","consistency":"file system","set":"00abcdef01234567","machine_count":2,"machines":["web1","a \"b\"\tc"],"frozen_ms":12,"paused_ms":3}"#;

/// Valid text for every parser of this module.
pub(super) fn seeds() -> impl Iterator<Item = (&'static str, &'static str, Vec<u8>)> {
    let files = [
        ("holdfast_toml", "small", CONFIGURATION),
        ("host_snapshot_record", "machines", RECORD),
        ("sanoid_conf", "templates", POLICY),
    ];
    let calendars = CALENDARS.map(|(name, text)| ("calendar", name, text));
    let all = files.into_iter().chain(calendars);
    all.map(|(parser, name, text)| (parser, name, text.as_bytes().to_vec()))
}

/// A calendar expression, and the instants that follow from it.
pub fn calendar(bytes: &[u8]) -> Outcome {
    let Ok(calendar) = String::from_utf8_lossy(bytes).parse::<Calendar>() else {
        return Outcome::Refused;
    };
    assert_eq!(
        calendar.to_string().parse(),
        Ok(calendar.clone()),
        "it reads as another one"
    );
    let zone = TimeZone::get("Europe/Berlin").unwrap_or(TimeZone::UTC);
    for after in times() {
        let mut last = after;
        for instant in calendar.instants_after(after, &zone).take(3) {
            assert!(
                instant > last && calendar.matches(instant, &zone),
                "{instant} after {last}"
            );
            last = instant;
        }
    }
    Outcome::Decoded
}

/// A `holdfast.toml`, and the command lines of its jobs.
pub fn holdfast_toml(bytes: &[u8]) -> Outcome {
    match Config::parse(&String::from_utf8_lossy(bytes)) {
        Ok(config) => {
            for job in &config.jobs {
                assert!(!config.command(job).is_empty(), "a job without a command");
                assert!(config.job(&job.name).is_some(), "a job that is not found");
            }
            for pool in &config.pools {
                let word = format!("xen://{}/a", pool.name);
                assert!(pool.addressed(&word).is_some(), "a pool that its name does not mean");
            }
            Outcome::Decoded
        }
        Err(errors) => {
            assert!(!errors.is_empty(), "refused without a reason");
            assert!(
                errors.iter().all(|error| !error.to_string().is_empty()),
                "an error says nothing"
            );
            Outcome::Refused
        }
    }
}

/// A `sanoid.conf`, and what it means for datasets, those that it names among them.
pub fn sanoid_conf(bytes: &[u8]) -> Outcome {
    let Ok(config) = SanoidConfig::parse(&String::from_utf8_lossy(bytes)) else {
        return Outcome::Refused;
    };
    let mut datasets: Vec<String> = ["tank", "tank/vm", "tank/vm/a", "tank/vm/a/b"]
        .map(str::to_owned)
        .to_vec();
    datasets.extend(config.datasets().take(8).map(str::to_owned));
    let resolved = config.resolve(&datasets);
    for policy in &resolved.datasets {
        // What is taken and what goes is asked with these.
        let is_any = policy.takes() || policy.prunes() || policy.is_monitored();
        assert!(policy.settings().count() > 0 || !is_any, "a policy out of nothing");
    }
    Outcome::Decoded
}

/// The record of a host snapshot.
pub fn host_snapshot_record(bytes: &[u8]) -> Outcome {
    let Some(record) = HostSnapshotRecord::parse(&String::from_utf8_lossy(bytes)) else {
        return Outcome::Refused;
    };
    assert!(record.time >= Timestamp::MIN && record.machines.len() as u64 <= record.machine_count);
    let again = HostSnapshotRecord::parse(&record.encode()).expect("what was read can be kept");
    assert!(record.machines.starts_with(&again.machines), "it reads as another one");
    Outcome::Decoded
}
