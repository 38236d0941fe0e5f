//! Plans replication: what to send so that a replica of a dataset has the host snapshots of its source. Pure, from
//! lists to steps.
//!
//! A host snapshot and its copy share an *identity* (ZFS's GUID, the received UUID of btrfs). A snapshot without an
//! identity is identified by name and time together. The *common* snapshot is the newest snapshot of the target that
//! the source also has, as a snapshot or as a bookmark. Newer snapshots of the source are sent on top of it.
//!
//! Nothing is ever removed from the target to make a stream fit. If no stream can be sent without that, the plan is
//! [`ReplicaPlan::Diverged`].

/// A host snapshot or a bookmark.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReplicaPoint {
    /// The name, without the name of the dataset.
    pub name: String,
    /// The identity that a snapshot shares with its copies; empty if unknown.
    pub identity: String,
    /// Creation time, in seconds since 1970-01-01 UTC.
    pub time_s: i64,
    /// Snapshot or bookmark.
    pub kind: PointKind,
    /// Whether the point is to be sent.
    pub is_wanted: bool,
}

/// The kind of a point.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PointKind {
    /// A snapshot.
    Snapshot,
    /// Only a time and an identity: later changes can be sent, the snapshot itself cannot.
    Bookmark,
}

/// The order that a target requires.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TargetOrder {
    /// A received snapshot must follow the newest one (ZFS).
    Linear,
    /// Snapshots are independent (btrfs).
    Free,
}

/// Which of the new snapshots are sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SnapshotChoice {
    /// All of them.
    Each,
    /// Only the newest.
    Newest,
}

/// How many snapshots one stream carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Streams {
    /// One snapshot.
    One,
    /// Consecutive snapshots.
    Many,
}

/// The rules of a replication.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReplicaRules {
    /// The order that the target requires.
    pub order: TargetOrder,
    /// Which snapshots are sent.
    pub choice: SnapshotChoice,
    /// How many snapshots one stream carries.
    pub streams: Streams,
}

/// One stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReplicaStep {
    /// The base that the target has; `None` for a full stream.
    pub base: Option<(String, PointKind)>,
    /// The snapshot that the stream ends with.
    pub to: String,
    /// The number of snapshots in it.
    pub count: usize,
}

/// Why nothing has to be sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Idle {
    /// The target has the newest wanted snapshot.
    UpToDate,
    /// The source has no snapshot.
    NoSnapshots,
    /// The source has no wanted snapshot.
    NoneWanted,
}

/// Why nothing can be sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Divergence {
    /// The target has snapshots, but the source has none of them.
    NoCommonSnapshot,
    /// The target has newer snapshots that the source does not have.
    TargetHasNewer {
        /// The common snapshot, by its name on the target.
        common: String,
        /// The newer snapshots of the target.
        own: Vec<String>,
    },
    /// The target dataset exists but has no snapshot.
    TargetIsNoReplica,
}

/// The plan of a replication.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReplicaPlan {
    /// Nothing has to be sent.
    Idle(Idle),
    /// Send these streams in order.
    Send(Vec<ReplicaStep>),
    /// Nothing can be sent before the user decides what to discard.
    Diverged(Divergence),
}

/// A plan, and the lag of the target.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Replication {
    /// The plan.
    pub plan: ReplicaPlan,
    /// The common snapshot, by its name on the target.
    pub common: Option<String>,
    /// The number of wanted snapshots that the target lacks.
    pub behind_count: usize,
    /// How much older the newest snapshot of the target is than that of the source, in seconds; `None` if the target
    /// has no snapshot.
    pub behind_s: Option<i64>,
    /// Snapshots that are not sent because the target has different snapshots with the same names.
    pub name_conflicts: Vec<String>,
}

/// Whether two points are the same snapshot.
fn is_same(a: &ReplicaPoint, b: &ReplicaPoint) -> bool {
    if a.identity.is_empty() || b.identity.is_empty() {
        return a.name == b.name && a.time_s == b.time_s;
    }
    a.identity == b.identity
}

/// Plans a replication. Both lists are sorted, oldest first. `target` is `None` if the target dataset does not exist.
pub fn plan_replication(source: &[ReplicaPoint], target: Option<&[ReplicaPoint]>, rules: ReplicaRules) -> Replication {
    let received = target.unwrap_or_default();
    let common = common_of(source, received, rules.order);
    let after = common.map_or(0, |(at, _)| at + 1);
    let base = common.map(|(at, _)| &source[at]);
    let is_new =
        |point: &&ReplicaPoint| point.kind == PointKind::Snapshot && base.is_none_or(|base| !is_same(base, point));
    let newer: Vec<&ReplicaPoint> = source[after..].iter().filter(is_new).collect();
    let name_conflicts = |point: &ReplicaPoint| received.iter().any(|there| there.name == point.name);
    let clashing: Vec<String> = newer
        .iter()
        .filter(|point| point.is_wanted && name_conflicts(point))
        .map(|point| point.name.clone())
        .collect();
    let mut is_sent: Vec<bool> = newer
        .iter()
        .map(|point| point.is_wanted && !name_conflicts(point))
        .collect();
    let behind_count = newer.iter().filter(|point| point.is_wanted).count();
    if rules.choice == SnapshotChoice::Newest
        && let Some(last) = is_sent.iter().rposition(|sent| *sent)
    {
        is_sent[..last].fill(false);
    }
    let newest = source
        .iter()
        .rfind(|point| point.kind == PointKind::Snapshot && point.is_wanted);
    let plan = match divergence(target, common.map(|(_, at)| at), rules) {
        _ if newest.is_none() => ReplicaPlan::Idle(idle_without(source)),
        Some(divergence) => ReplicaPlan::Diverged(divergence),
        None if is_sent.contains(&true) => ReplicaPlan::Send(steps(base, &newer, &is_sent, rules)),
        None => ReplicaPlan::Idle(Idle::UpToDate),
    };
    let behind_s = base.zip(newest).map(|(base, newest)| match behind_count {
        0 => 0,
        _ => newest.time_s.saturating_sub(base.time_s).max(0),
    });
    Replication {
        plan,
        common: common.map(|(_, at)| received[at].name.clone()),
        behind_count,
        behind_s,
        name_conflicts: clashing,
    }
}

fn idle_without(source: &[ReplicaPoint]) -> Idle {
    if source.iter().any(|point| point.kind == PointKind::Snapshot) {
        Idle::NoneWanted
    } else {
        Idle::NoSnapshots
    }
}

/// The index of the common snapshot in the source and in the target. In the source, a snapshot is preferred to a
/// bookmark.
fn common_of(source: &[ReplicaPoint], received: &[ReplicaPoint], order: TargetOrder) -> Option<(usize, usize)> {
    let matched = |there: &ReplicaPoint| {
        let matches = || source.iter().enumerate().filter(|(_, here)| is_same(here, there));
        let snapshot = matches().find(|(_, here)| here.kind == PointKind::Snapshot);
        snapshot.or_else(|| matches().next()).map(|(at, _)| at)
    };
    let pairs = received
        .iter()
        .enumerate()
        .filter_map(|(at, there)| Some((matched(there)?, at)));
    match order {
        TargetOrder::Linear => pairs.max_by_key(|(_, at)| *at),
        TargetOrder::Free => pairs.max(),
    }
}

fn divergence(target: Option<&[ReplicaPoint]>, common: Option<usize>, rules: ReplicaRules) -> Option<Divergence> {
    let received = target.filter(|_| rules.order == TargetOrder::Linear)?;
    match common {
        _ if received.is_empty() => Some(Divergence::TargetIsNoReplica),
        None => Some(Divergence::NoCommonSnapshot),
        Some(at) if at + 1 < received.len() => Some(Divergence::TargetHasNewer {
            common: received[at].name.clone(),
            own: received[at + 1..].iter().map(|point| point.name.clone()).collect(),
        }),
        Some(_) => None,
    }
}

/// The streams for the snapshots to send that are newer than `base`.
fn steps(
    base: Option<&ReplicaPoint>,
    newer: &[&ReplicaPoint],
    is_sent: &[bool],
    rules: ReplicaRules,
) -> Vec<ReplicaStep> {
    let mut steps: Vec<ReplicaStep> = Vec::new();
    let mut base = base.map(|point| (point.name.clone(), point.kind));
    // Whether nothing lies between the snapshot and the end of the previous stream: a stream of several snapshots
    // contains everything in between.
    let mut is_next = true;
    // Whether the last stream can be extended: its base is a snapshot that the target has.
    let mut may_grow = false;
    for (point, is_sent) in newer.iter().zip(is_sent) {
        if !is_sent {
            is_next = false;
            continue;
        }
        let to = point.name.clone();
        if let Some(last) = steps.last_mut().filter(|_| may_grow && is_next) {
            last.to.clone_from(&to);
            last.count += 1;
        } else {
            let begins = matches!(base, Some((_, PointKind::Snapshot)));
            may_grow = rules.streams == Streams::Many && is_next && begins;
            steps.push(ReplicaStep {
                base: base.take(),
                to: to.clone(),
                count: 1,
            });
        }
        base = Some((to, PointKind::Snapshot));
        is_next = true;
    }
    steps
}
