//! Properties of every policy and every set of snapshots.

use std::collections::{BTreeSet, HashSet};

use holdfast_policy::{
    Candidate, Period, Policy, Protection, Reason, RetentionPlan, TimeZone, Timestamp, Verdict, plan,
};
use proptest::prelude::*;

/// 2026-10-24T00:00Z: in the following night, the clocks of Berlin are set back.
const START_SECONDS: i64 = 1_792_800_000;

fn berlin() -> TimeZone {
    TimeZone::get("Europe/Berlin").unwrap()
}

fn at(seconds: i64) -> Timestamp {
    Timestamp::from_second(START_SECONDS + seconds).unwrap()
}

/// Times that are seconds to years apart, so that some periods get several snapshots and others none; some are equal.
fn candidates() -> impl Strategy<Value = Vec<Candidate>> {
    let scale = prop_oneof![Just(60), Just(1800), Just(86_400), Just(86_400 * 30)];
    let one = (scale, -60_i64..20, "[a-c]", prop::bool::weighted(0.1)).prop_map(|(scale, steps, tag, protected)| {
        (
            at(scale * steps),
            tag,
            if protected {
                Protection::Protected
            } else {
                Protection::None
            },
        )
    });
    prop::collection::vec(one, 0..60).prop_map(|all| {
        let numbered = all.into_iter().enumerate();
        numbered
            .map(|(index, (time, tag, protection))| Candidate {
                time,
                id: format!("{index:04}"),
                tags: vec![tag],
                protection,
            })
            .collect()
    })
}

fn policies() -> impl Strategy<Value = Policy> {
    let count = || prop::option::weighted(0.4, 0_u32..6);
    let counts = (count(), count(), count(), count(), count(), count());
    let within = prop::option::weighted(
        0.3,
        prop_oneof![Just("5h"), Just("3d"), Just("1w"), Just("1m"), Just("1y2m")],
    );
    let tags = prop::collection::vec("[a-b]", 0..2);
    (counts, within, tags).prop_map(|(counts, within, keep_tags)| {
        let (keep_last, keep_hourly, keep_daily, keep_weekly, keep_monthly, keep_yearly) = counts;
        Policy {
            keep_last,
            keep_hourly,
            keep_daily,
            keep_weekly,
            keep_monthly,
            keep_yearly,
            keep_within: within.map(|text| text.parse().unwrap()),
            keep_tags,
        }
    })
}

fn decide(policy: &Policy, candidates: &[Candidate]) -> RetentionPlan {
    plan(policy, candidates, at(0), &berlin())
}

fn kept(plan: &RetentionPlan) -> BTreeSet<Candidate> {
    plan.kept().cloned().collect()
}

/// A policy that keeps, for each rule, what `a` or `b` keeps.
fn union(a: &Policy, b: &Policy) -> Policy {
    let mut policy = Policy {
        keep_last: a.keep_last.max(b.keep_last),
        keep_hourly: a.keep_hourly.max(b.keep_hourly),
        keep_daily: a.keep_daily.max(b.keep_daily),
        keep_weekly: a.keep_weekly.max(b.keep_weekly),
        keep_monthly: a.keep_monthly.max(b.keep_monthly),
        keep_yearly: a.keep_yearly.max(b.keep_yearly),
        keep_within: a.keep_within.or(b.keep_within),
        keep_tags: a.keep_tags.clone(),
    };
    policy.keep_tags.extend(b.keep_tags.iter().cloned());
    policy
}

fn period_of(reason: &Reason) -> Option<(Period, &str)> {
    match reason {
        Reason::LastOfPeriod { period, name, .. } => Some((*period, name)),
        _ => None,
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_snapshot_has_one_decision_with_a_reason(policy in policies(), candidates in candidates()) {
        let plan = decide(&policy, &candidates);
        let mut expected = candidates;
        expected.sort_by(|a, b| b.cmp(a));
        let decided: Vec<_> = plan.decisions().iter().map(|decision| decision.candidate.clone()).collect();
        prop_assert_eq!(decided, expected);
        for decision in plan.decisions() {
            let is_removed = decision.verdict == Verdict::Remove;
            prop_assert!(!decision.reasons.is_empty());
            prop_assert_eq!(is_removed, decision.reasons == [Reason::NoRule]);
            prop_assert!(is_removed || !decision.reasons.contains(&Reason::NoRule));
        }
    }

    #[test]
    fn an_empty_policy_keeps_all(candidates in candidates(), zero in prop::option::of(Just(0))) {
        let policy = Policy { keep_last: zero, keep_daily: zero, ..Policy::default() };
        prop_assert_eq!(decide(&policy, &candidates).removed().count(), 0);
    }

    #[test]
    fn protected_future_and_newest_are_never_removed(policy in policies(), candidates in candidates()) {
        let plan = decide(&policy, &candidates);
        let newest = candidates.iter().filter(|candidate| candidate.time <= at(0)).max();
        for removed in plan.removed() {
            prop_assert_eq!(removed.protection, Protection::None);
            prop_assert!(removed.time <= at(0));
            prop_assert_ne!(Some(removed), newest);
        }
    }

    #[test]
    fn adding_rules_or_raising_counts_never_removes_more(a in policies(), b in policies(), candidates in candidates()) {
        prop_assume!(!a.is_empty());
        let fewer = kept(&decide(&a, &candidates));
        let more = kept(&decide(&union(&a, &b), &candidates));
        prop_assert!(fewer.is_subset(&more), "lost {:?}", fewer.difference(&more));
    }

    #[test]
    fn protecting_one_never_removes_another(policy in policies(), mut candidates in candidates(), index: prop::sample::Index) {
        prop_assume!(!candidates.is_empty());
        let ids = |plan: &RetentionPlan| plan.kept().map(|kept| kept.id.clone()).collect::<BTreeSet<_>>();
        let before = ids(&decide(&policy, &candidates));
        let index = index.index(candidates.len());
        candidates[index].protection = Protection::Protected;
        prop_assert!(before.is_subset(&ids(&decide(&policy, &candidates))));
    }

    #[test]
    fn pruning_again_removes_nothing(policy in policies(), candidates in candidates()) {
        let survivors: Vec<_> = decide(&policy, &candidates).kept().cloned().collect();
        let again = decide(&policy, &survivors);
        prop_assert_eq!(again.removed().count(), 0);
    }

    #[test]
    fn the_order_of_the_candidates_does_not_matter(
        policy in policies(),
        (candidates, shuffled) in candidates().prop_flat_map(|all| (Just(all.clone()), Just(all).prop_shuffle())),
    ) {
        prop_assert_eq!(decide(&policy, &candidates), decide(&policy, &shuffled));
    }

    #[test]
    fn future_snapshots_do_not_affect_decisions(policy in policies(), candidates in candidates()) {
        let past: Vec<_> = candidates.iter().filter(|candidate| candidate.time <= at(0)).cloned().collect();
        let with_future = decide(&policy, &candidates);
        let of_past: Vec<_> =
            with_future.decisions().iter().filter(|decision| decision.candidate.time <= at(0)).cloned().collect();
        let without = decide(&policy, &past);
        prop_assert_eq!(&of_past, without.decisions());
    }

    /// A rule keeps as many snapshots as it says, or one for each existing period: the newest one of the period.
    #[test]
    fn counts_are_kept_exactly(count in 1_u32..8, candidates in candidates()) {
        let policy = Policy {
            keep_last: Some(count),
            keep_hourly: Some(count),
            keep_daily: Some(count),
            keep_weekly: Some(count),
            keep_monthly: Some(count),
            keep_yearly: Some(count),
            ..Policy::default()
        };
        let past: Vec<_> = candidates.iter().filter(|candidate| candidate.time <= at(0)).collect();
        let plan = decide(&policy, &candidates);
        let reasons = || plan.decisions().iter().flat_map(|decision| &decision.reasons);
        let last_count = reasons().filter(|reason| matches!(reason, Reason::Last { .. })).count();
        prop_assert_eq!(last_count, past.len().min(count as usize));
        for period in Period::ALL {
            // Distinguishes periods in another way than the plan, which uses names.
            let key = |time: Timestamp| {
                let zoned = time.to_zoned(berlin());
                let date = zoned.date();
                match period {
                    Period::Hour => time.as_second().div_euclid(3600),
                    Period::Day => i64::from(date.year()) * 1000 + i64::from(date.day_of_year()),
                    Period::Week => {
                        let week = date.iso_week_date();
                        i64::from(week.year()) * 100 + i64::from(week.week())
                    }
                    Period::Month => i64::from(date.year()) * 100 + i64::from(date.month()),
                    Period::Year => i64::from(date.year()),
                }
            };
            let existing: HashSet<_> = past.iter().map(|candidate| key(candidate.time)).collect();
            let names: HashSet<_> = reasons().filter_map(period_of).filter(|(kind, _)| *kind == period).collect();
            prop_assert_eq!(names.len(), existing.len().min(count as usize), "{:?}", period);
            for decision in plan.decisions() {
                if decision.reasons.iter().filter_map(period_of).any(|(kind, _)| kind == period) {
                    let own = key(decision.candidate.time);
                    let newest = past.iter().filter(|candidate| key(candidate.time) == own).max();
                    prop_assert_eq!(newest, Some(&&decision.candidate));
                }
            }
        }
    }

    /// Pruning after each snapshot leaves the same as pruning once at the end.
    #[test]
    fn repeated_prunes_keep_the_same_as_one_final_prune(policy in policies(), candidates in candidates()) {
        let mut history: Vec<_> = candidates.into_iter().filter(|candidate| candidate.time <= at(0)).collect();
        history.sort();
        let mut store = Vec::new();
        for candidate in &history {
            let now = candidate.time;
            store.push(candidate.clone());
            store = plan(&policy, &store, now, &berlin()).kept().cloned().collect();
        }
        prop_assert_eq!(store.into_iter().collect::<BTreeSet<_>>(), kept(&decide(&policy, &history)));
    }
}
