//! Properties of every replication plan, checked against a model of a target.

use holdfast_policy::{
    Divergence, Idle, PointKind, ReplicaPlan, ReplicaPoint, ReplicaRules, ReplicaStep, SnapshotChoice, Streams,
    TargetOrder, plan_replication,
};
use proptest::prelude::*;

const LINEAR: ReplicaRules = ReplicaRules {
    order: TargetOrder::Linear,
    choice: SnapshotChoice::Each,
    streams: Streams::Many,
};

fn point(name: &str, identity: u64) -> ReplicaPoint {
    ReplicaPoint {
        name: name.to_owned(),
        identity: identity.to_string(),
        time_s: i64::try_from(identity).unwrap() * 60,
        kind: PointKind::Snapshot,
        is_wanted: true,
    }
}

fn points(names: &str) -> Vec<ReplicaPoint> {
    let named = names.split_whitespace().map(|name| {
        let identity = u64::from(name.as_bytes()[0]);
        let mut point = point(name.trim_end_matches(['#', '-']), identity);
        if name.ends_with('#') {
            point.kind = PointKind::Bookmark;
        }
        point.is_wanted = !name.ends_with('-');
        point
    });
    named.collect()
}

/// `full>a a>b+1`: base and end of each stream, and the number of snapshots before the last one.
fn describe(plan: &ReplicaPlan) -> String {
    let step = |step: &ReplicaStep| {
        let base = match &step.base {
            None => "full".to_owned(),
            Some((name, PointKind::Snapshot)) => name.clone(),
            Some((name, PointKind::Bookmark)) => format!("{name}#"),
        };
        let more = if step.count > 1 {
            format!("+{}", step.count - 1)
        } else {
            String::new()
        };
        format!("{base}>{}{more}", step.to)
    };
    match plan {
        ReplicaPlan::Send(steps) => steps.iter().map(step).collect::<Vec<_>>().join(" "),
        other => format!("{other:?}"),
    }
}

fn planned(source: &str, target: Option<&str>, rules: ReplicaRules) -> String {
    let target = target.map(points);
    describe(&plan_replication(&points(source), target.as_deref(), rules).plan)
}

#[test]
fn new_snapshots_are_sent_in_the_fewest_streams() {
    let one = ReplicaRules {
        streams: Streams::One,
        ..LINEAR
    };
    let newest = ReplicaRules {
        choice: SnapshotChoice::Newest,
        ..LINEAR
    };
    assert_eq!(planned("a b c d", None, LINEAR), "full>a a>d+2");
    assert_eq!(planned("a b c d", None, one), "full>a a>b b>c c>d");
    assert_eq!(planned("a b c d", None, newest), "full>d");
    assert_eq!(planned("a b c d", Some("a b"), LINEAR), "b>d+1");
    assert_eq!(planned("a b c d", Some("a b"), newest), "b>d");
    assert_eq!(planned("a b c d", Some("d"), LINEAR), "Idle(UpToDate)");
    // No stream contains an unwanted snapshot.
    assert_eq!(planned("a b- c d e- f g", Some("a"), LINEAR), "a>c c>d d>f f>g");
    assert_eq!(planned("a b c d- e f g", Some("a"), LINEAR), "a>c+1 c>e e>g+1");
    assert_eq!(planned("a- b-", None, LINEAR), "Idle(NoneWanted)");
    assert_eq!(planned("", None, LINEAR), "Idle(NoSnapshots)");
}

#[test]
fn a_bookmark_replaces_a_removed_snapshot() {
    assert_eq!(planned("b# c d e", Some("a b"), LINEAR), "b#>c c>e+1");
    assert_eq!(planned("b# b c", Some("a b"), LINEAR), "b>c");
    assert_eq!(planned("b b# c", Some("a b"), LINEAR), "b>c");
    assert_eq!(planned("a b#", Some("a b"), LINEAR), "Idle(UpToDate)");
    assert_eq!(planned("b#", Some("a b"), LINEAR), "Idle(NoSnapshots)");
}

#[test]
fn nothing_is_sent_where_something_would_be_lost() {
    let diverged =
        |source: &str, target: &str| match plan_replication(&points(source), Some(&points(target)), LINEAR).plan {
            ReplicaPlan::Diverged(divergence) => divergence,
            other => panic!("{other:?}"),
        };
    let has_newer = |common: &str, own: &[&str]| Divergence::TargetHasNewer {
        common: common.to_owned(),
        own: own.iter().map(|name| (*name).to_owned()).collect(),
    };
    assert_eq!(diverged("a b", "a x y"), has_newer("a", &["x", "y"]));
    assert_eq!(diverged("a", "a x"), has_newer("a", &["x"]));
    assert_eq!(diverged("b c", "x y"), Divergence::NoCommonSnapshot);
    assert_eq!(diverged("b c", ""), Divergence::TargetIsNoReplica);
    // Snapshots of btrfs do not depend on one another.
    let free = ReplicaRules {
        order: TargetOrder::Free,
        ..LINEAR
    };
    assert_eq!(planned("a b", Some("a x y"), free), "a>b");
    assert_eq!(planned("b c", Some("x y"), free), "full>b b>c");
    assert_eq!(planned("b c", Some(""), free), "full>b b>c");
}

#[test]
fn names_that_clash_are_left_out_and_reported() {
    let mut target = points("a b");
    target[0].name = "d".to_owned();
    let plan = plan_replication(&points("b c d e"), Some(&target), LINEAR);
    assert_eq!(
        (describe(&plan.plan), plan.name_conflicts),
        ("b>c c>e".to_owned(), vec!["d".to_owned()])
    );
    assert_eq!((plan.behind_count, plan.behind_s), (3, Some(3 * 60)));
}

#[test]
fn where_there_are_no_identities_name_and_time_count() {
    let without = |names: &str| {
        let mut points = points(names);
        for point in &mut points {
            point.identity.clear();
        }
        points
    };
    let plan = |target: &[ReplicaPoint]| describe(&plan_replication(&points("a b c"), Some(target), LINEAR).plan);
    assert_eq!(plan(&without("a b")), "b>c");
    let mut other = without("a b");
    other[1].time_s += 1;
    assert!(plan(&other).starts_with("Diverged(TargetHasNewer"), "{}", plan(&other));
    assert_eq!(
        describe(&plan_replication(&[], None, LINEAR).plan),
        format!("{:?}", ReplicaPlan::Idle(Idle::NoSnapshots))
    );
}

/// A model of a target with ZFS or btrfs.
#[derive(Debug, Clone, Default)]
struct Model {
    is_there: bool,
    received: Vec<ReplicaPoint>,
}

impl Model {
    /// Receives a stream; an error describes why the target refuses it.
    fn receive(&mut self, source: &[ReplicaPoint], step: &ReplicaStep, order: TargetOrder) -> Result<(), String> {
        let find = |name: &str, kind| source.iter().position(|point| point.name == name && point.kind == kind);
        let to = find(&step.to, PointKind::Snapshot).ok_or("it is not there")?;
        let first = match &step.base {
            None if order == TargetOrder::Linear && self.is_there => return Err("it exists".to_owned()),
            None => to,
            Some((name, kind)) => {
                let base = find(name, *kind).ok_or("the base is not there")?;
                let has = |point: &ReplicaPoint| point.identity == source[base].identity;
                let fits = match order {
                    TargetOrder::Linear => self.received.last().is_some_and(has),
                    TargetOrder::Free => self.received.iter().any(has),
                };
                if !fits {
                    return Err("the base is not its newest".to_owned());
                }
                if step.count == 1 {
                    to
                } else if *kind == PointKind::Snapshot {
                    base + 1
                } else {
                    return Err("a bookmark begins no stream of several".to_owned());
                }
            }
        };
        let sent: Vec<&ReplicaPoint> = source[first..=to]
            .iter()
            .filter(|point| point.kind == PointKind::Snapshot)
            .collect();
        if sent.len() != step.count {
            return Err(format!("it brings {} and not {}", sent.len(), step.count));
        }
        for point in sent {
            if !point.is_wanted {
                return Err(format!("{} is not wanted", point.name));
            }
            if self.received.iter().any(|there| there.name == point.name) {
                return Err(format!("{} is there already", point.name));
            }
            self.received.push(point.clone());
        }
        self.is_there = true;
        Ok(())
    }
}

/// Events at the source and its target between two runs.
#[derive(Debug, Clone)]
enum Happening {
    Take {
        wanted: bool,
        name: usize,
    },
    Remove(usize),
    LeaveBookmark(usize),
    TargetTakes,
    TargetLoses(usize),
    /// This many streams are received.
    Replicate(usize),
}

fn happenings() -> impl Strategy<Value = Vec<Happening>> {
    let one = prop_oneof![
        5 => (prop::bool::weighted(0.8), 0_usize..40).prop_map(|(wanted, name)| Happening::Take { wanted, name }),
        2 => (0_usize..8).prop_map(Happening::Remove),
        1 => (0_usize..8).prop_map(Happening::LeaveBookmark),
        1 => Just(Happening::TargetTakes),
        1 => (0_usize..8).prop_map(Happening::TargetLoses),
        4 => (0_usize..6).prop_map(Happening::Replicate),
    ];
    prop::collection::vec(one, 0..40)
}

fn rules() -> impl Strategy<Value = ReplicaRules> {
    (any::<bool>(), any::<bool>(), any::<bool>()).prop_map(|(free, newest, many)| ReplicaRules {
        order: if free { TargetOrder::Free } else { TargetOrder::Linear },
        choice: if newest {
            SnapshotChoice::Newest
        } else {
            SnapshotChoice::Each
        },
        streams: if many { Streams::Many } else { Streams::One },
    })
}

proptest! {
    /// After any history, the target accepts every stream of a plan, loses nothing, and has the newest snapshot at the
    /// end; or the plan reports a reason, and the target would have accepted no stream.
    #[test]
    fn every_plan_is_taken_to_its_end(happenings in happenings(), rules in rules()) {
        let mut source: Vec<ReplicaPoint> = Vec::new();
        let mut target: Option<Model> = None;
        let mut identity = 0;
        for happening in happenings {
            identity += 1;
            match happening {
                Happening::Take { wanted, name } => {
                    let name = format!("s{name}");
                    if !source.iter().any(|point| point.name == name && point.kind == PointKind::Snapshot) {
                        source.push(ReplicaPoint { is_wanted: wanted, ..point(&name, identity) });
                    }
                }
                Happening::Remove(at) if at < source.len() => drop(source.remove(at)),
                // ZFS allows one bookmark of a name in a dataset.
                Happening::LeaveBookmark(at) if at < source.len() => {
                    let name = source[at].name.clone();
                    let is_it = |point: &ReplicaPoint| point.kind == PointKind::Bookmark && point.name == name;
                    if !source.iter().any(is_it) {
                        source[at].kind = PointKind::Bookmark;
                    }
                }
                Happening::TargetTakes => {
                    if let Some(model) = &mut target {
 model.received.push(point(&format!("t{identity}"), identity));
}
                }
                Happening::TargetLoses(at) => {
                    if let Some(model) = target.as_mut().filter(|model| at < model.received.len()) {
 model.received.remove(at);
}
                }
                Happening::Remove(_) | Happening::LeaveBookmark(_) => {}
                Happening::Replicate(count) => {
                    let before = target.clone();
                    let received = target.as_ref().map(|model| &model.received[..]);
                    let replication = plan_replication(&source, received, rules);
                    match replication.plan {
                        ReplicaPlan::Send(steps) => {
                            let is_whole = count >= steps.len();
                            let model = target.get_or_insert_default();
                            for step in steps.iter().take(count) {
                                let taken = model.receive(&source, step, rules.order);
                                prop_assert!(taken.is_ok(), "{step:?}: {taken:?} at {model:?} from {source:?}");
                            }
                            if count == 0 {
                                target.clone_from(&before);
                            }
                            if let Some(model) = target.as_ref().filter(|_| is_whole) {
                                let again = plan_replication(&source, Some(&model.received), rules);
                                prop_assert_eq!(again.plan, ReplicaPlan::Idle(Idle::UpToDate));
                                prop_assert!(again.behind_count <= again.name_conflicts.len().max(replication.name_conflicts.len()));
                            }
                        }
                        ReplicaPlan::Diverged(_) => {
                            prop_assert_eq!(rules.order, TargetOrder::Linear);
                            let model = target.as_ref().unwrap();
                            for base in source.iter().map(Some).chain([None]) {
                                for to in source.iter().filter(|to| to.kind == PointKind::Snapshot && to.is_wanted) {
                                    let base = base.map(|base| (base.name.clone(), base.kind));
                                    let step = ReplicaStep { base, to: to.name.clone(), count: 1 };
                                    let taken = model.clone().receive(&source, &step, rules.order);
                                    let is_new = !model.received.iter().any(|there| there.identity == to.identity);
                                    prop_assert!(taken.is_err() || !is_new, "{step:?} would have gone to {model:?}");
                                }
                            }
                        }
                        ReplicaPlan::Idle(_) => prop_assert!(replication.behind_count == replication.name_conflicts.len()),
                    }
                    let before = before.unwrap_or_default().received;
                    let after = target.clone().unwrap_or_default().received;
                    prop_assert!(after.starts_with(&before));
                }
            }
        }
    }
}
