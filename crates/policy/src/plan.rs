//! Decides which snapshots to keep.
//!
//! A rule about periods keeps the *newest* snapshot of each. The newest snapshot of a past period remains the newest,
//! even if others are removed, so pruning often and pruning rarely have the same result. A daily snapshot can also be
//! the weekly, monthly and yearly one if the week, month and year end with its day, so few snapshots fulfil many rules.
//!
//! Periods without a snapshot do not count: a machine that was off for a month keeps as many days as any other.
//! Snapshots in the future are kept and do not count either: otherwise one wrong clock would displace good snapshots.

use std::collections::HashSet;

use jiff::Timestamp;
use jiff::tz::TimeZone;

use crate::{Period, Policy, Reason};

/// The properties of a snapshot that retention depends on.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Candidate {
    /// Its point in time.
    pub time: Timestamp,
    /// Identifies the snapshot in the plan, and orders snapshots of the same time.
    pub id: String,
    /// The user's tags.
    pub tags: Vec<String>,
    /// Whether retention may remove the snapshot.
    pub protection: Protection,
}

/// Whether retention may remove a snapshot.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Protection {
    /// The rules decide.
    #[default]
    None,
    /// Never removed by a rule. The snapshot still counts in the rules.
    Protected,
}

/// Whether a snapshot is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Verdict {
    /// The snapshot is kept.
    Keep,
    /// The snapshot is removed when the plan is executed.
    Remove,
}

/// The decision for one snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Decision {
    /// The snapshot.
    pub candidate: Candidate,
    /// Keep or remove.
    pub verdict: Verdict,
    /// All reasons to keep it, or [`Reason::NoRule`]; never empty.
    pub reasons: Vec<Reason>,
}

/// A decision for each snapshot, the newest first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RetentionPlan {
    decisions: Vec<Decision>,
}

impl RetentionPlan {
    /// All decisions, the newest snapshot first.
    pub fn decisions(&self) -> &[Decision] {
        &self.decisions
    }

    /// The snapshots to keep, the newest first.
    pub fn kept(&self) -> impl Iterator<Item = &Candidate> {
        self.with_verdict(Verdict::Keep)
    }

    /// The snapshots to remove, the newest first.
    pub fn removed(&self) -> impl Iterator<Item = &Candidate> {
        self.with_verdict(Verdict::Remove)
    }

    fn with_verdict(&self, verdict: Verdict) -> impl Iterator<Item = &Candidate> {
        let matching = self
            .decisions
            .iter()
            .filter(move |decision| decision.verdict == verdict);
        matching.map(|decision| &decision.candidate)
    }
}

/// Decides for each of `candidates`, the snapshots of one machine, whether `policy` keeps it at `now`.
///
/// Calendar periods are those of `zone`. The order of `candidates` does not matter; of several snapshots of the same
/// time, the one with the greatest id counts as the newest.
pub fn plan(policy: &Policy, candidates: &[Candidate], now: Timestamp, zone: &TimeZone) -> RetentionPlan {
    let mut newest_first = candidates.to_vec();
    newest_first.sort_unstable_by(|a, b| b.cmp(a));
    let future_count = newest_first.partition_point(|candidate| candidate.time > now);

    let mut reasons: Vec<Vec<Reason>> = newest_first.iter().map(own_reasons).collect();
    let (future, past) = reasons.split_at_mut(future_count);
    for reasons in future {
        reasons.push(Reason::Future);
    }
    apply_rules(policy, &newest_first[future_count..], zone, past);

    let decide = |(candidate, mut reasons): (Candidate, Vec<Reason>)| {
        if policy.is_empty() {
            reasons.push(Reason::EmptyPolicy);
        }
        let verdict = if reasons.is_empty() {
            Verdict::Remove
        } else {
            Verdict::Keep
        };
        if verdict == Verdict::Remove {
            reasons.push(Reason::NoRule);
        }
        Decision {
            candidate,
            verdict,
            reasons,
        }
    };
    RetentionPlan {
        decisions: newest_first.into_iter().zip(reasons).map(decide).collect(),
    }
}

/// Reasons that do not depend on the policy.
fn own_reasons(candidate: &Candidate) -> Vec<Reason> {
    match candidate.protection {
        Protection::None => Vec::new(),
        Protection::Protected => vec![Reason::Protected],
    }
}

/// Adds to `reasons` why each of `past`, the newest first and none in the future, is kept.
fn apply_rules(policy: &Policy, past: &[Candidate], zone: &TimeZone, reasons: &mut [Vec<Reason>]) {
    let Some(newest) = past.first() else { return };
    reasons[0].push(Reason::Newest);
    if let Some(count) = policy.last_count() {
        for (place, reasons) in (1..=count).zip(reasons.iter_mut()) {
            reasons.push(Reason::Last { place, count });
        }
    }
    for period in Period::ALL {
        if let Some(count) = policy.count_of(period) {
            keep_last_of_each(period, count, past, zone, reasons);
        }
    }
    // Relative to the newest snapshot, not to now: a machine that was off for a year does not lose its history when it
    // is used again.
    let within = policy
        .keep_within
        .map(|span| (span, span.before(&newest.time.to_zoned(zone.clone()))));
    for (candidate, reasons) in past.iter().zip(reasons) {
        if let Some((span, start)) = within
            && candidate.time >= start
        {
            reasons.push(Reason::Within { span });
        }
        let kept_tag = policy.keep_tags.iter().find(|tag| candidate.tags.contains(tag));
        reasons.extend(kept_tag.map(|tag| Reason::Tag { tag: tag.clone() }));
    }
}

/// Keeps the newest snapshot of each of the newest `count` periods that have one.
fn keep_last_of_each(period: Period, count: u32, past: &[Candidate], zone: &TimeZone, reasons: &mut [Vec<Reason>]) {
    let mut seen = HashSet::new();
    let mut place = 0;
    for (candidate, reasons) in past.iter().zip(reasons) {
        let name = period.name_at(&candidate.time.to_zoned(zone.clone()));
        if !seen.insert(name.clone()) {
            continue;
        }
        place += 1;
        reasons.push(Reason::LastOfPeriod {
            period,
            place,
            count,
            name,
        });
        if place == count {
            return;
        }
    }
}
