//! The retention policy.

use crate::{Period, Span};

/// The retention rules. A snapshot is kept if any rule keeps it.
///
/// The default has no rule and keeps everything. A count of 0 means no rule: it must not remove everything by
/// accident.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Policy {
    /// Number of newest snapshots to keep.
    pub keep_last: Option<u32>,
    /// Number of hours of which the newest snapshot is kept; hours without a snapshot do not count.
    pub keep_hourly: Option<u32>,
    /// Number of days of which the newest snapshot is kept; days without a snapshot do not count.
    pub keep_daily: Option<u32>,
    /// Number of ISO weeks of which the newest snapshot is kept; weeks without a snapshot do not count.
    pub keep_weekly: Option<u32>,
    /// Number of months of which the newest snapshot is kept; months without a snapshot do not count.
    pub keep_monthly: Option<u32>,
    /// Number of years of which the newest snapshot is kept; years without a snapshot do not count.
    pub keep_yearly: Option<u32>,
    /// Keeps every snapshot that is at most this much older than the newest one.
    pub keep_within: Option<Span>,
    /// Keeps every snapshot that has any of these tags.
    pub keep_tags: Vec<String>,
}

impl Policy {
    /// Whether there is no rule, so that everything is kept.
    pub fn is_empty(&self) -> bool {
        self.last_count().is_none()
            && Period::ALL.iter().all(|period| self.count_of(*period).is_none())
            && self.keep_within.is_none()
            && self.keep_tags.is_empty()
    }

    /// The number of newest snapshots to keep; never `Some(0)`.
    pub(crate) fn last_count(&self) -> Option<u32> {
        self.keep_last.filter(|count| *count > 0)
    }

    /// The number of periods of this kind to keep; never `Some(0)`.
    pub(crate) fn count_of(&self, period: Period) -> Option<u32> {
        let count = match period {
            Period::Hour => self.keep_hourly,
            Period::Day => self.keep_daily,
            Period::Week => self.keep_weekly,
            Period::Month => self.keep_monthly,
            Period::Year => self.keep_yearly,
        };
        count.filter(|count| *count > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::Policy;

    #[test]
    fn every_rule_counts_and_zero_is_none() {
        assert!(Policy::default().is_empty());
        let count_rules: [fn(&mut Policy) -> &mut Option<u32>; 6] = [
            |policy| &mut policy.keep_last,
            |policy| &mut policy.keep_hourly,
            |policy| &mut policy.keep_daily,
            |policy| &mut policy.keep_weekly,
            |policy| &mut policy.keep_monthly,
            |policy| &mut policy.keep_yearly,
        ];
        for rule in count_rules {
            let mut policy = Policy::default();
            *rule(&mut policy) = Some(0);
            assert!(policy.is_empty());
            *rule(&mut policy) = Some(1);
            assert!(!policy.is_empty());
        }
        let within = Policy {
            keep_within: Some("1h".parse().unwrap()),
            ..Policy::default()
        };
        let tags = Policy {
            keep_tags: vec!["release".to_owned()],
            ..Policy::default()
        };
        assert!(!within.is_empty() && !tags.is_empty());
    }
}
