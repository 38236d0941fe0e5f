use super::Config;
use crate::sanoid::Origin;

const WHOLE: &str = r#"
version = 1
[daemon]
jobs_at_once = 3
[repositories.main]
path = "/backup/vms"
password_file = "/etc/holdfast/password"
jobs_at_once = 1
[retention.standard]
keep_daily = 7
keep_within = "12h"
[defaults]
repository = "main"
retries = 1
quiesce = "require"
[jobs.nightly]
do = "backup"
machines = ["web*", "-odd"]
exclude_machine = ["web-test"]
with_memory = "live"
when = ["Mon..Fri 02:30", "Sat 04:00"]
timeout = "6h"
[jobs.thin]
do = "prune"
retention = "standard"
keep_daily = 14
when = "weekly"
notify = "admin"
[notify.admin]
by = "mail"
to = "root"
"#;

fn errors(text: &str) -> Vec<String> {
    let errors = Config::parse(text).unwrap_err();
    errors.iter().map(ToString::to_string).collect()
}

fn warnings(text: &str) -> Vec<String> {
    let config = Config::parse(text).unwrap();
    config.warnings().iter().map(ToString::to_string).collect()
}

#[test]
fn a_job_is_a_command_line() {
    let config = Config::parse(WHOLE).unwrap();
    let words = |name: &str| config.command(config.job(name).unwrap()).join(" ");
    assert_eq!(
        words("nightly"),
        "backup --repository /backup/vms --password-file /etc/holdfast/password --exclude-machine web-test \
         --quiesce require --with-memory=live -- web* -odd"
    );
    assert_eq!(
        words("thin"),
        "prune --repository /backup/vms --password-file /etc/holdfast/password --keep-daily 14 --keep-within 12h"
    );
    assert!(config.warnings().is_empty(), "{:?}", config.warnings());
}

#[test]
fn every_setting_has_its_origin() {
    let config = Config::parse(WHOLE).unwrap();
    let of = |job: &str, key: &str| {
        let settings = &config.job(job).unwrap().settings;
        let setting = settings.iter().find(|setting| setting.key == key).unwrap();
        let origin = match &setting.origin {
            Origin::Default => "built in".to_owned(),
            Origin::Line { section, line } => format!("{section} {line}"),
        };
        format!("{}, {origin}", setting.value)
    };
    assert_eq!(of("nightly", "timeout"), "6h, jobs.nightly 22");
    assert_eq!(of("nightly", "retries"), "1, defaults 14");
    assert_eq!(of("nightly", "quiesce"), "require, defaults 15");
    assert_eq!(of("nightly", "jitter"), "0s, built in");
    assert_eq!(of("thin", "keep_daily"), "14, jobs.thin 26");
    assert_eq!(of("thin", "keep_within"), "12h, standard 11");
}

#[test]
fn every_error_is_reported_with_its_line() {
    let text = r#"version = 2
colour = "red"
[demon]
x = 1
[daemon]
jobs_at_one = 3
[repositories.main]
path = "relative"
password_file = "/a"
password_command = "b"
[repositories."bad name"]
path = "/x"
[jobs.one]
do = "bakcup"
[jobs.two]
do = "backup"
repository = "mian"
machines = ["a"]
images = ["b"]
when = "dayly"
bwlimt = "5M"
timeout = "5m"
[jobs.three]
do = "prune"
repository = "main"
retention = "none"
keep_daily = -1
[jobs.four]
when = "daily"
[jobs.five]
do = "snapshot"
notify = ["missing"]
repository = "main"
[notify.a]
by = "ntfy"
url = "ftp://x"
to = ["x"]
[jobs]
six = 3
"#;
    assert_eq!(
        errors(&text.replace("[jobs]\nsix = 3\n", "")),
        [
            "line 1: version in the first lines: it should be 1, the only supported version",
            "line 2: there is no setting \"colour\" in the first lines",
            "line 3: there is no section [demon]: did you mean daemon?",
            "line 6: there is no setting \"jobs_at_one\" in [daemon]: did you mean jobs_at_once?",
            "line 8: path in [repositories.main]: it should be an absolute path in quotes",
            "line 10: [repositories.main]: password_file and password_command are both given, and only one can hold the password",
            "line 11: \"bad name\" is not a valid name: use letters, digits, - and _, at most 64, and begin with a letter or digit",
            "line 14: do in [jobs.one]: it should be one of backup, snapshot, cron, host-prune, prune, gc, scrub, copy, replicate, verify, doctor, fresh, monitor-snapshots, monitor-health, monitor-capacity; did you mean backup?",
            "line 17: there is no [repositories.mian], which [jobs.two] names: did you mean main?",
            "line 19: [jobs.two]: machines and images cannot be in one job: use two jobs",
            "line 20: when in [jobs.two]: it should be a calendar expression like \"daily\" or \"Mon..Fri 02:30\", or a list of them: \"dayly\" is neither a day of the week nor a word like hourly, daily or weekly; did you mean daily?",
            "line 21: there is no setting \"bwlimt\" in [jobs.two]: did you mean bwlimit?",
            "line 22: timeout in [jobs.two]: it should be a length of time like \"90s\", \"5min\", \"2h\" or \"1d\": \"5m\": m could be minutes or months: write min for minutes",
            "line 26: there is no [retention.none], which [jobs.three] names",
            "line 27: keep_daily in [jobs.three]: it should be a whole number from 0 to 1000000",
            "line 28: [jobs.four] needs do = one of backup, snapshot, cron, host-prune, prune, gc, scrub, copy, replicate, verify, doctor, fresh, monitor-snapshots, monitor-health, monitor-capacity",
            "line 30: [jobs.five] needs machines or datasets",
            "line 32: there is no [notify.missing], which [jobs.five] names",
            "line 33: there is no setting \"repository\" in [jobs.five]",
            "line 36: url in [notify.a]: it should be an address that begins with https:// or http://, without spaces",
            "line 37: [notify.a]: to is not a setting of ntfy",
        ]
    );
    assert_eq!(
        errors("version = 1\n[jobs]\nsix = 3\ndaemon = 1\n[[notify]]\nx = 1\n[jobs.a\n")[..2],
        [
            "line 3: jobs is a section: write [jobs.six]".to_owned(),
            "line 4: jobs is a section: write [jobs.daemon]".to_owned(),
        ]
    );
    assert!(errors("")[0].contains("version = 1 as its first line"));
    assert!(errors("version = 1\nversion = 1\n")[0].starts_with("line 2: "));
}

#[test]
fn suspicious_settings_are_warnings() {
    assert_eq!(
        warnings("version = 1"),
        [
            "there is no job: write a section [jobs.NAME]",
            "no notification of failed jobs is configured: write a section [notify.NAME]"
        ]
    );
    let text = r#"version = 1
[repositories.a]
path = "/a"
[repositories.b]
path = "/b"
[jobs.one]
do = "prune"
repository = "a"
[jobs.two]
do = "prune"
repository = "a"
when = "*-*-* 00:00:00"
[notify.n]
by = "webhook"
url = "http://localhost/x"
"#;
    assert_eq!(
        warnings(text),
        [
            "line 6: [jobs.one] has no retention rule, so it keeps everything: name a retention, or set keep_daily and the like",
            "line 9: [jobs.two] has no retention rule, so it keeps everything: name a retention, or set keep_daily and the like",
            "line 9: [jobs.two] does the same as [jobs.one], at the same times",
            "line 4: no job uses [repositories.b]",
        ]
    );
    let job = |when: &str| {
        let text = format!("version = 1\n[jobs.a]\ndo = \"cron\"\njitter = \"2h\"\nwhen = \"{when}\"\n");
        let job = Config::parse(&text).unwrap().jobs.remove(0);
        let doubts = job.timing_warnings("2026-11-20T12:00:00Z".parse().unwrap(), &crate::TimeZone::UTC);
        doubts.iter().map(ToString::to_string).collect::<Vec<_>>()
    };
    assert_eq!(job("daily"), [""; 0]);
    assert_eq!(
        job("2020-01-01"),
        ["line 2: [jobs.a] is never due: 2020-01-01 00:00:00 has no future date"]
    );
    assert_eq!(
        job("hourly"),
        ["line 2: [jobs.a] may wait up to 2h, longer than the 1h from one time to the next"]
    );
}

/// Invalid input is an error, never a panic.
#[test]
fn any_input_gives_a_configuration_or_an_error() {
    use proptest::prelude::{Just, ProptestConfig, Strategy as _, any, prop_oneof, proptest};

    let piece = prop_oneof![
        Just("[jobs.a]\n".to_owned()),
        Just("[".to_owned()),
        Just("do = \"backup\"\n".to_owned()),
        Just("when = [\"daily\", 3]\n".to_owned()),
        Just("keep_daily = 0x7fffffffffffffffff\n".to_owned()),
        Just("retention = \"a\"\n[retention.a]\n".to_owned()),
        Just("jobs.a.do = 1\n".to_owned()),
        any::<String>(),
    ];
    let text = proptest::collection::vec(piece, 0..12).prop_map(|pieces| pieces.concat());
    proptest!(ProptestConfig::with_cases(512), |(text in text)| {
        let text = format!("version = 1\n{text}");
        if let Err(errors) = Config::parse(&text) {
            assert!(!errors.is_empty());
            assert!(errors.iter().all(|error| error.line() <= u32::try_from(text.lines().count()).unwrap() + 1));
        }
    });
}

const POOLS: &str = r#"
version = 1
[repositories.main]
path = "/backup"
[pools.lab]
address = "xen1.example.org:8443"
user = "backup"
password_command = "pass lab"
certificate = ["AA", "BB"]
read = "vhd"
connections = 4
keep_nothing = true
[pools.bare]
[defaults]
repository = "main"
quiesce = "require"
scratch = "/var/scratch"
threads = 2
[jobs.lab]
do = "backup"
machines = ["xen://lab/tag:nightly", "xen://ana@lab/web1"]
[jobs.bare]
do = "backup"
machines = "xen://bare"
[jobs.host]
do = "backup"
machines = "xen://10.0.0.1/web*"
"#;

#[test]
fn a_job_gets_the_options_of_its_pool() {
    let config = Config::parse(POOLS).unwrap();
    let words = |name: &str| config.command(config.job(name).unwrap()).join(" ");
    assert_eq!(
        words("lab"),
        "backup --repository /backup --threads 2 --pool-password-command pass lab --pool-certificate AA --pool-certificate BB \
         --pool-read vhd --pool-connections 4 --pool-keep-nothing -- xen://backup@xen1.example.org:8443/tag:nightly \
         xen://ana@xen1.example.org:8443/web1"
    );
    assert_eq!(words("bare"), "backup --repository /backup --threads 2 -- xen://bare");
    assert_eq!(
        words("host"),
        "backup --repository /backup --threads 2 -- xen://10.0.0.1/web*"
    );
    let pool = config.pool("lab").unwrap();
    assert_eq!(pool.addressed("xen://other/web1"), None);
    assert_eq!(pool.addressed("lab"), None);
    assert_eq!(
        pool.addressed("xen://lab").as_deref(),
        Some("xen://backup@xen1.example.org:8443")
    );
    assert_eq!(config.pool("bare").unwrap().address, "bare");
}
