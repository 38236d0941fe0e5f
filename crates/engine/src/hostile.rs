//! Fuzzing entry points for text that users type: see [`holdfast_block::hostile`].

mod configured;

use holdfast_block::hostile::{Outcome, Parser};
use holdfast_policy::{Candidate as Kept, Policy, Protection, Span, TimeZone, Timestamp, plan};

use crate::repository::resolve::resolve;
use crate::{Candidate, SnapshotName};
pub use configured::{calendar, holdfast_toml, host_snapshot_record, sanoid_conf};

/// The parsers of this crate, and those of the `policy` crate that it uses.
pub const PARSERS: &[Parser] = &[
    Parser {
        name: "calendar",
        feed: calendar,
    },
    Parser {
        name: "holdfast_toml",
        feed: holdfast_toml,
    },
    Parser {
        name: "host_snapshot_record",
        feed: host_snapshot_record,
    },
    Parser {
        name: "retention",
        feed: retention,
    },
    Parser {
        name: "sanoid_conf",
        feed: sanoid_conf,
    },
    Parser {
        name: "serve_request",
        feed: serve_request,
    },
    Parser {
        name: "snapshot_name",
        feed: snapshot_name,
    },
    Parser {
        name: "template_statement",
        feed: template_statement,
    },
];

/// Valid text for every parser of this crate: name of the parser, name of the seed, bytes.
pub fn seeds() -> Vec<(&'static str, &'static str, Vec<u8>)> {
    let mut seeds: Vec<_> = configured::seeds().collect();
    for (name, text) in [
        ("week", "7d"),
        ("mixed", "1y6m"),
        ("all", "9999y9999m9999w9999d9999h"),
        ("spaces", " 12h "),
    ] {
        seeds.push(("retention", name, text.as_bytes().to_vec()));
    }
    for (name, text) in [
        ("id", "3fa2c1"),
        ("latest", "latest"),
        ("machine", "web1:vda"),
        ("newest", "web1@latest"),
        ("day", "web1@2026-11-20"),
        ("local", "web1@2026-11-20T10:00:30"),
        ("offset", "web1@2026-11-20T10:00:00.5+01:00:vda"),
        ("utc", "web1@9999-12-31T23:59:59Z"),
        ("script", "b\u{fc}ro \u{202f}1@2026-11-20"),
    ] {
        seeds.push(("snapshot_name", name, text.as_bytes().to_vec()));
    }
    for (name, text) in SERVE_REQUESTS {
        seeds.push(("serve_request", name, text.as_bytes().to_vec()));
    }
    let digest = "0123456789abcdef".repeat(4);
    for (name, text) in [
        (
            "disk",
            format!(
                "holdfast-template 1\nname debian\ntag latest\ntime 2026-11-23T20:50:09.500Z\ndisk 512 {digest} disk\n"
            ),
        ),
        (
            "machine",
            format!(
                "holdfast-template 1\nname team/web\ntag 1.0\ntime 2026-11-23T20:50:09.000Z\ndescription nginx, b\u{fc}ro\n\
                 disk 5368709120 {digest} vda\ndisk 0 {digest} data disk\nfile 4096 {digest} domain.xml\n"
            ),
        ),
    ] {
        seeds.push(("template_statement", name, text.into_bytes()));
    }
    seeds
}

/// Requests to a running server.
const SERVE_REQUESTS: [(&str, &str); 4] = [
    ("list", r#"{"version":1,"request":"list"}"#),
    (
        "add",
        r#"{"version":1,"request":"add","exports":[{"snapshot":{"name":"web1"}},{"image":{"path":"/a.raw","name":"a","format":"raw","allow":["/b"]}}],"writes":{"keep":"/c"},"machine":"m"}"#,
    ),
    (
        "remove",
        r#"{"version":1,"request":"remove","export":"web1/vda","force":true}"#,
    ),
    ("stop", r#"{"version":1,"request":"stop"}"#),
];

/// Parses a request to a running server, and what it names.
pub fn serve_request(bytes: &[u8]) -> Outcome {
    crate::restore::serve::hostile_request(bytes)
}

/// Parses the statement of a template.
pub fn template_statement(bytes: &[u8]) -> Outcome {
    crate::template::hostile_statement(bytes)
}

/// The limits of clocks and calendars, and some times between.
const TIMES: [i64; 5] = [-377_705_023_201, -1, 0, 1_795_000_000, 253_402_207_200];

fn times() -> impl Iterator<Item = Timestamp> {
    TIMES
        .into_iter()
        .map(|second| Timestamp::from_second(second).expect("a time of the calendar"))
}

/// Parses a duration and applies retention with it, at both limits of the calendar.
pub fn retention(bytes: &[u8]) -> Outcome {
    let Ok(span) = String::from_utf8_lossy(bytes).parse::<Span>() else {
        return Outcome::Refused;
    };
    assert_eq!(span.to_string().parse(), Ok(span), "it reads as another span");
    let policy = Policy {
        keep_within: Some(span),
        ..Policy::default()
    };
    let candidates: Vec<Kept> = times()
        .map(|time| Kept {
            time,
            id: time.to_string(),
            tags: Vec::new(),
            protection: Protection::None,
        })
        .collect();
    for now in times() {
        let plan = plan(&policy, &candidates, now, &TimeZone::UTC);
        assert_eq!(
            plan.decisions().len(),
            candidates.len(),
            "every snapshot has a decision"
        );
        assert!(plan.kept().count() > 0, "the newest stays");
    }
    Outcome::Decoded
}

/// Parses the name of a snapshot and resolves it.
pub fn snapshot_name(bytes: &[u8]) -> Outcome {
    let Ok(name) = String::from_utf8_lossy(bytes).parse::<SnapshotName>() else {
        return Outcome::Refused;
    };
    let ids: Vec<String> = (0..TIMES.len()).map(|number| format!("3fa2{number:028x}")).collect();
    let candidates: Vec<Candidate<'_>> = times()
        .zip(&ids)
        .map(|(time, id)| Candidate {
            id,
            machine: "web1",
            time,
            distinction: None,
        })
        .collect();
    let found = resolve(&name.snapshot, &candidates, &TimeZone::UTC);
    match found {
        Ok(index) => assert!(index < candidates.len(), "a snapshot that is not in the list"),
        Err(error) => assert!(!error.to_string().is_empty(), "an error says nothing"),
    }
    assert!(
        resolve(&name.snapshot, &[], &TimeZone::UTC).is_err(),
        "found where there is none"
    );
    Outcome::Decoded
}
