//! Plans for known calendars, as text files in `tests/golden`: the rules, the snapshots, and the expected plan.
//!
//! A file has three parts, with `---` between them:
//! - one line each for `zone NAME`, `now TIME` and the rules (`keep-daily 7`, `keep-within 7d`, `keep-tag release`);
//! - the snapshots: `TIME ID [protected] [tag ...]`;
//! - the plan: `keep` or `remove`, time, id, reasons.
//!
//! `#` begins a comment. The plan is written by hand, or reviewed before it is stored.

use std::fmt::Write as _;
use std::path::Path;

use holdfast_policy::{Candidate, Policy, Protection, RetentionPlan, TimeZone, Timestamp, Verdict, plan};

struct Case {
    zone: TimeZone,
    now: Timestamp,
    policy: Policy,
    candidates: Vec<Candidate>,
    expected: String,
}

fn parse(text: &str) -> Case {
    let without_comments = text
        .lines()
        .filter(|line| !line.starts_with('#'))
        .collect::<Vec<_>>()
        .join("\n");
    let [head, snapshots, expected] = without_comments.split("---\n").collect::<Vec<_>>()[..] else {
        panic!("three parts with --- between them");
    };
    let mut zone = None;
    let mut now = None;
    let mut policy = Policy::default();
    for line in head.lines().filter(|line| !line.is_empty()) {
        let (key, value) = line.split_once(' ').unwrap();
        match key {
            "zone" => zone = Some(TimeZone::get(value).unwrap()),
            "now" => now = Some(value.parse().unwrap()),
            "keep-last" => policy.keep_last = Some(value.parse().unwrap()),
            "keep-hourly" => policy.keep_hourly = Some(value.parse().unwrap()),
            "keep-daily" => policy.keep_daily = Some(value.parse().unwrap()),
            "keep-weekly" => policy.keep_weekly = Some(value.parse().unwrap()),
            "keep-monthly" => policy.keep_monthly = Some(value.parse().unwrap()),
            "keep-yearly" => policy.keep_yearly = Some(value.parse().unwrap()),
            "keep-within" => policy.keep_within = Some(value.parse().unwrap()),
            "keep-tag" => policy.keep_tags.push(value.to_owned()),
            _ => panic!("unknown line: {line}"),
        }
    }
    Case {
        zone: zone.expect("a zone"),
        now: now.expect("now"),
        policy,
        candidates: snapshots
            .lines()
            .filter(|line| !line.is_empty())
            .map(parse_candidate)
            .collect(),
        expected: expected.trim().to_owned(),
    }
}

fn parse_candidate(line: &str) -> Candidate {
    let mut words = line.split_whitespace();
    let time = words.next().unwrap().parse().unwrap();
    let id = words.next().unwrap().to_owned();
    let (protected, tags): (Vec<_>, Vec<_>) = words.map(str::to_owned).partition(|word| word == "protected");
    Candidate {
        time,
        id,
        tags,
        protection: if protected.is_empty() {
            Protection::None
        } else {
            Protection::Protected
        },
    }
}

fn render(plan: &RetentionPlan, zone: &TimeZone) -> String {
    let mut text = String::new();
    for decision in plan.decisions() {
        let verdict = match decision.verdict {
            Verdict::Keep => "keep",
            Verdict::Remove => "remove",
        };
        let time = decision
            .candidate
            .time
            .to_zoned(zone.clone())
            .strftime("%Y-%m-%dT%H:%M%:z")
            .to_string();
        let reasons: Vec<_> = decision.reasons.iter().map(ToString::to_string).collect();
        writeln!(
            text,
            "{verdict:<6} {time} {:<4} {}",
            decision.candidate.id,
            reasons.join("; ")
        )
        .unwrap();
    }
    text.trim().to_owned()
}

#[test]
fn plans_match_the_golden_files() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    let mut case_count = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let case = parse(&std::fs::read_to_string(&path).unwrap());
        let actual = render(&plan(&case.policy, &case.candidates, case.now, &case.zone), &case.zone);
        assert!(
            actual == case.expected,
            "{}\n== expected\n{}\n== actual\n{actual}\n",
            path.display(),
            case.expected
        );
        case_count += 1;
    }
    assert!(case_count >= 6, "only {case_count} golden files were found");
}
