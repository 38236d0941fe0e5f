//! Notifications: to a webhook receiver on this host, and to a stand-in for sendmail.

use super::{Host, Receiver, at_home, wait_until};

/// The missing repository makes the job fail.
const FAILING: &str = r#"
[repositories.gone]
path = "{here}/gone"
[jobs.thin]
do = "prune"
repository = "gone"
keep_last = 1
when = "*:*:0/1"
retries = 0
[notify.chat]
by = "webhook"
url = "{url}"
on = ["failure", "success"]
token_file = "{here}/token"
[notify.admin]
by = "mail"
to = ["root", "ops@example.org"]
"#;

#[test]
fn failure_and_recovery_are_notified_once_each() {
    let receiver = Receiver::new(1);
    let host = Host::new(&FAILING.replace("{url}", &receiver.url));
    host.rig.write("token", b"a \"secret\"\n");
    host.program("sendmail", "echo \"$@\" >> {here}/mails\ncat >> {here}/mails");
    let daemon = host.start(&[]);
    host.wait_for("thin", &["failed", "failed", "failed"]);
    wait_until("the first message", || !receiver.received().is_empty());
    assert_eq!(receiver.subjects(), ["thin has failed"]);
    let (head, body) = &receiver.received()[0];
    assert!(head.contains("Authorization: Bearer a \"secret\"\r\n"), "{head}");
    assert!(body.contains("\"event\":\"failure\""), "{body}");

    host.rig.ok(&["init", "-r", "gone", "--no-encryption"]);
    wait_until("the good news", || {
        receiver
            .subjects()
            .iter()
            .any(|subject| subject.ends_with("thin has recovered"))
    });
    wait_until("a success", || {
        receiver
            .subjects()
            .iter()
            .any(|subject| subject.ends_with("thin completed"))
    });
    let mails = || String::from_utf8(host.rig.read("mails")).unwrap();
    wait_until("two mails", || {
        mails().matches("\nTo: root, ops@example.org\n").count() == 2
    });
    assert!(
        mails().starts_with("-t -oi\n") && mails().contains("thin has failed"),
        "{}",
        mails()
    );
    assert_eq!(daemon.stop(), Some(0));
    let notices = host.journal("notice");
    assert!(
        notices
            .iter()
            .any(|notice| notice["to"] == "chat" && notice["error"].is_null())
    );
    let secret = host.log() + &std::fs::read_to_string(host.rig.path("state/runs.jsonl")).unwrap();
    assert!(!secret.contains("secret"));
}

#[test]
fn a_machine_without_a_fresh_snapshot_is_notified() {
    let receiver = Receiver::new(0);
    let jobs = r#"
[jobs.look]
do = "fresh"
repository = "main"
machines = ["a", "never"]
within = "1d"
when = "*:*:0/1"
[notify.phone]
by = "ntfy"
url = "{url}"
on = ["silence"]
"#;
    let host = Host::new(&jobs.replace("{url}", &receiver.url));
    host.rig.ok(&["backup", "a.raw", "--time", "2020-01-01T00:00:00Z"]);
    let daemon = host.start(&[]);
    wait_until("two messages", || receiver.received().len() == 2);
    let heads: Vec<String> = receiver.received().into_iter().map(|(head, _)| head).collect();
    assert!(
        heads.iter().any(|head| head.contains(": a has no fresh snapshot\r\n")),
        "{heads:?}"
    );
    assert!(heads.iter().all(|head| head.contains("Priority: 4\r\n")), "{heads:?}");
    host.rig.ok(&["backup", "a.raw"]);
    wait_until("good news", || receiver.received().len() == 3);
    let (head, _) = &receiver.received()[2];
    assert!(
        head.contains(": a has a fresh snapshot again\r\n") && head.contains("Priority: 2\r\n"),
        "{head}"
    );
    let jobs = host.rig.json(3, &at_home(&["jobs"]));
    assert_eq!(jobs["report"]["jobs"][0]["silent"], serde_json::json!(["never"]));
    assert_eq!(daemon.stop(), Some(0));
    // The same as a check for a monitoring system.
    host.rig
        .code(2, &["monitor", "machines", "a", "never", "--within", "1d"]);
    host.rig.code(0, &["monitor", "machines", "--within", "1d"]);
    host.rig
        .code(3, &["monitor", "machines", "-r", "nowhere", "--within", "1d"]);
}

#[test]
fn a_test_message_can_be_sent() {
    let receiver = Receiver::new(0);
    let host = Host::new(&FAILING.replace("{url}", &receiver.url));
    host.rig.write("token", b"x\n");
    let sent = host.rig.report(&at_home(&["notify", "chat"]));
    assert_eq!(
        (&sent["by"], &sent["error"]),
        (&"webhook".into(), &serde_json::Value::Null)
    );
    assert!(receiver.subjects()[0].ends_with("this is a test"));
    std::fs::remove_file(host.rig.path("token")).unwrap();
    let failed = host.rig.json(1, &at_home(&["notify", "chat"]));
    assert!(
        failed["report"]["error"].as_str().unwrap().contains("read the token"),
        "{failed}"
    );
    host.rig.code(1, &at_home(&["notify", "missing"]));
}
