//! Commands that check and show a holdfast.toml.

use serde_json::Value;

use super::{Host, Receiver, at_home};

#[test]
fn a_configuration_is_shown_with_the_origin_of_every_setting() {
    let host =
        Host::new("[jobs.a]\ndo = \"gc\"\nrepository = \"main\"\nwhen = \"daily UTC\"\n[defaults]\nretries = 7\n");
    let checked = host.rig.json(3, &["config", "check", "holdfast.toml"]);
    assert_eq!(checked["report"]["errors"], serde_json::json!([]));
    assert!(
        checked["report"]["doubts"].to_string().contains("no notification"),
        "{checked}"
    );
    let shown = host.rig.json(3, &["config", "show", "holdfast.toml", "--effective"]);
    let job = &shown["report"]["jobs"][0];
    assert_eq!(job["next"].as_array().unwrap().len(), 3);
    assert_eq!(job["command"], host.filled("holdfast gc --repository {here}/repo"));
    let settings = job["settings"].as_array().unwrap();
    let of = |key: &str| settings.iter().find(|setting| setting["key"] == key).unwrap();
    assert_eq!(
        (&of("retries")["value"], &of("retries")["section"]),
        (&"7".into(), &"defaults".into())
    );
    assert_eq!(
        (&of("timeout")["value"], &of("timeout")["line"]),
        (&"1d".into(), &Value::Null)
    );
    // The path may also come from the environment.
    let mut command = host.rig.command(&["config", "show"]);
    let output = command.env("HOLDFAST_CONFIG", "holdfast.toml").output().unwrap();
    assert!(
        crate::program::stdout(&output).contains("line 8, [jobs.a]"),
        "{}",
        crate::program::stdout(&output)
    );

    host.configure("[jobs.a]\ndo = \"gc\"\nrepositry = \"main\"\n[jobs.b]\ndo = \"backup\"\nrepository = \"main\"\nall = true\nbwlimit = \"fast\"\n");
    let checked = host.rig.json(1, &["config", "check", "holdfast.toml"]);
    let errors = checked["report"]["errors"].as_array().unwrap();
    assert_eq!(
        errors,
        &["line 9: there is no setting \"repositry\" in [jobs.a]: did you mean repository?"]
    );
    host.configure("[jobs.b]\ndo = \"backup\"\nrepository = \"main\"\nall = true\nbwlimit = \"fast\"\n");
    let (kind, text) = host.rig.error(1, &at_home(&["jobs"]));
    assert_eq!(kind, "refused");
    assert!(
        text.contains("line 11: [jobs.b]: invalid value 'fast' for '--bwlimit"),
        "{text}"
    );
    assert!(text.contains("config check"), "{text}");
}

/// A password command of a configuration runs as the user of the program: a configuration that others can write is
/// refused.
#[test]
fn a_configuration_that_others_can_write_is_refused() {
    let host = Host::new("[jobs.a]\ndo = \"gc\"\nrepository = \"main\"\nwhen = \"daily UTC\"\n");
    let path = host.rig.path("holdfast.toml");
    host.rig.ok(&at_home(&["jobs"]));
    std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o666)).unwrap();
    let (kind, text) = host.rig.error(1, &at_home(&["jobs"]));
    assert_eq!(kind, "refused");
    assert!(
        text.contains("other users can write it") && text.contains("chmod"),
        "{text}"
    );
    let checked = host.rig.json(1, &["config", "check", "holdfast.toml"]);
    let errors = checked["report"]["errors"].to_string();
    assert!(errors.contains("it is not trusted"), "{errors}");
}

/// Warnings that depend on this host: missing files, and jobs that are never due.
#[test]
fn configurations_that_cannot_work_on_this_host_are_warned_about() {
    let jobs = r#"
[repositories.sealed]
path = "{here}/nowhere"
password_file = "{here}/no-password"
[jobs.a]
do = "gc"
repository = "sealed"
when = "2020-01-01"
[jobs.b]
do = "verify"
repository = "main"
[notify.phone]
by = "ntfy"
url = "http://localhost/topic"
token_file = "{here}/no-token"
"#;
    let host = Host::new(jobs);
    let checked = host.rig.json(3, &["config", "check", "holdfast.toml"]);
    let doubts = checked["report"]["doubts"].as_array().unwrap();
    let doubts: Vec<&str> = doubts.iter().map(|doubt| doubt.as_str().unwrap()).collect();
    assert_eq!(doubts.len(), 4, "{doubts:?}");
    for (doubt, part) in doubts.iter().zip([
        "line 11: [jobs.a] is never due",
        "line 8: the folder ",
        "line 8: the password file ",
        "line 18: the token file ",
    ]) {
        assert!(doubt.starts_with(part), "{doubt}");
    }
    // A sanoid.conf is recognised by its name, and is not checked as a holdfast.toml.
    host.rig.write("sanoid.conf", b"[tank]\nhourly = 3\n");
    host.rig.code(0, &["config", "check", "sanoid.conf"]);
    host.rig
        .code(2, &["config", "show", "holdfast.toml", "--dataset", "tank"]);
}

/// Reports of the verbs about jobs.
pub(crate) fn reports_of_schedules() -> Vec<(&'static str, Value)> {
    let receiver = Receiver::new(0);
    let jobs = r#"
[jobs.a]
do = "gc"
repository = "main"
when = "daily"
[notify.chat]
by = "webhook"
url = "{url}"
on = ["success"]
"#;
    let host = Host::new(&jobs.replace("{url}", &receiver.url));
    host.rig.ok(&["backup", "a.raw"]);
    let report = |verb: &[&str]| host.rig.report(&at_home(verb));
    let mut reports = vec![
        ("run", report(&["run", "a"])),
        ("runs", report(&["runs"])),
        ("jobs", report(&["jobs"])),
        ("notify", report(&["notify", "chat"])),
    ];
    reports.push((
        "config show",
        host.rig.report(&["config", "show", "holdfast.toml", "--effective"]),
    ));
    reports.push((
        "monitor machines",
        host.rig.report(&["monitor", "machines", "--within", "1d"]),
    ));
    reports
}
