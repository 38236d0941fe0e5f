//! The retention options of `prune`.

use holdfast_policy::{Policy, Span};

/// The rules of retention; none of them keeps everything.
#[derive(Debug, Clone, Default, PartialEq, Eq, clap::Args)]
#[command(next_help_heading = "What to keep (a snapshot that any rule keeps is kept; without a rule all are)")]
pub struct RetentionArgs {
    /// Keep the N newest snapshots of each machine
    #[arg(long, value_name = "N")]
    pub keep_last: Option<u32>,
    /// Keep the newest snapshot of each of the last N hours that have one
    #[arg(long, value_name = "N")]
    pub keep_hourly: Option<u32>,
    /// Keep the newest snapshot of each of the last N days that have one
    #[arg(long, value_name = "N")]
    pub keep_daily: Option<u32>,
    /// Keep the newest snapshot of each of the last N weeks (Monday to Sunday) that have one
    #[arg(long, value_name = "N")]
    pub keep_weekly: Option<u32>,
    /// Keep the newest snapshot of each of the last N months that have one
    #[arg(long, value_name = "N")]
    pub keep_monthly: Option<u32>,
    /// Keep the newest snapshot of each of the last N years that have one
    #[arg(long, value_name = "N")]
    pub keep_yearly: Option<u32>,
    /// Keep every snapshot that is at most SPAN (12h, 7d, 4w, 6m, 1y6m) older than the newest one
    #[arg(long, value_name = "SPAN")]
    pub keep_within: Option<Span>,
    /// Keep every snapshot with this tag; may be repeated
    #[arg(long = "keep-tag", value_name = "TAG")]
    pub keep_tags: Vec<String>,
}

impl RetentionArgs {
    /// The policy that these options define; a count of 0 is no rule.
    pub fn policy(&self) -> Policy {
        // All fields are named, so that the compiler reports a new option that is missing here.
        let Self {
            keep_last,
            keep_hourly,
            keep_daily,
            keep_weekly,
            keep_monthly,
            keep_yearly,
            keep_within,
            keep_tags,
        } = self.clone();
        Policy {
            keep_last,
            keep_hourly,
            keep_daily,
            keep_weekly,
            keep_monthly,
            keep_yearly,
            keep_within,
            keep_tags,
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;
    use holdfast_policy::Policy;

    use super::RetentionArgs;

    #[derive(Debug, clap::Parser)]
    struct Line {
        #[command(flatten)]
        retention: RetentionArgs,
    }

    fn parse(line: &str) -> Result<Policy, clap::Error> {
        let words = std::iter::once("prune").chain(line.split_whitespace());
        Line::try_parse_from(words).map(|line| line.retention.policy())
    }

    /// Each option has a different number, so that swapped options fail the test.
    #[test]
    fn every_option_becomes_its_rule() {
        let line = "--keep-last 1 --keep-hourly 2 --keep-daily 3 --keep-weekly 4 --keep-monthly 5 --keep-yearly 6 \
                    --keep-within 1y6m --keep-tag release --keep-tag golden";
        assert_eq!(
            parse(line).unwrap(),
            Policy {
                keep_last: Some(1),
                keep_hourly: Some(2),
                keep_daily: Some(3),
                keep_weekly: Some(4),
                keep_monthly: Some(5),
                keep_yearly: Some(6),
                keep_within: Some("1y6m".parse().unwrap()),
                keep_tags: vec!["release".to_owned(), "golden".to_owned()],
            }
        );
    }

    #[test]
    fn no_rule_and_counts_of_nothing_keep_everything() {
        assert!(parse("").unwrap().is_empty());
        assert!(parse("--keep-last 0 --keep-daily 0").unwrap().is_empty());
        assert!(!parse("--keep-tag x").unwrap().is_empty());
    }

    #[test]
    fn what_is_no_rule_is_refused_with_a_reason() {
        let error = |line: &str| parse(line).unwrap_err().to_string();
        assert!(
            error("--keep-within soon").contains("write it like 7d"),
            "{}",
            error("--keep-within soon")
        );
        assert!(error("--keep-last -1").contains("-1"));
        assert!(error("--keep-daily 4294967296").contains("4294967296"));
    }
}
