//! What is to be sent so that a copy of a dataset elsewhere has the host snapshots of its source: pure, from lists to steps.
//!
//! A host snapshot and its copy have one *identity* (ZFS's GUID, the UUID that btrfs hands on); where a side tells none, name and time
//! together stand for it. The newest of the target that the source knows too, as a snapshot or as a bookmark, is the *common* one: what is
//! newer at the source is sent on top of it.
//!
//! Nothing is ever taken away from the target to make it fit. Where nothing can be sent without that, the plan says so.

/// A host snapshot, or what is left of one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReplicaPoint {
    /// Its name, without that of its dataset.
    pub name: String,
    /// What it has in common with its copies; empty where that is not known.
    pub identity: String,
    /// When it was made, in seconds since 1970-01-01 UTC.
    pub time_s: i64,
    /// What it is.
    pub kind: PointKind,
    /// Whether it is to be sent.
    pub is_wanted: bool,
}

/// What can be sent from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PointKind {
    /// A snapshot.
    Snapshot,
    /// Its time and identity only: what changed since can be sent, it itself cannot.
    Bookmark,
}

/// What a target bears.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TargetOrder {
    /// What is received follows the newest that is there (ZFS).
    Linear,
    /// Each snapshot stands for itself (btrfs).
    Free,
}

/// Which of the new snapshots are sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Choice {
    /// All of them.
    Each,
    /// The newest alone.
    Newest,
}

/// How much goes in one stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Streams {
    /// One snapshot.
    One,
    /// Snapshots that follow one another.
    Many,
}

/// How it is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReplicaRules {
    /// What the target bears.
    pub order: TargetOrder,
    /// Which snapshots.
    pub choice: Choice,
    /// How much goes in one stream.
    pub streams: Streams,
}

/// One stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReplicaStep {
    /// What the target has already; none where all is sent.
    pub base: Option<(String, PointKind)>,
    /// What the target has afterwards.
    pub to: String,
    /// How many snapshots it brings: it, and those between.
    pub count: usize,
}

/// Why nothing has to be sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Idle {
    /// The target has the newest.
    UpToDate,
    /// The source has no snapshot.
    NoSnapshots,
    /// None that is wanted.
    NoneWanted,
}

/// Why nothing can be sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Divergence {
    /// The target has snapshots, none of which the source knows any more.
    NothingCommon,
    /// The target has snapshots of its own, newer than the common one.
    TargetWentOn {
        /// The common one, as the target calls it.
        common: String,
        /// Those.
        own: Vec<String>,
    },
    /// There is a dataset, and no snapshot of it.
    TargetIsNoCopy,
}

/// What to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReplicaPlan {
    /// Nothing.
    Idle(Idle),
    /// These, one after another.
    Send(Vec<ReplicaStep>),
    /// Nothing, until somebody has decided what is to be lost.
    Diverged(Divergence),
}

/// A plan, and how far the target is behind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Replication {
    /// What to do.
    pub plan: ReplicaPlan,
    /// The newest that both have, as the target calls it.
    pub common: Option<String>,
    /// How many snapshots that are wanted the target lacks.
    pub behind_count: usize,
    /// How much older its newest is than that of the source, in seconds; none where the target has nothing.
    pub behind_s: Option<i64>,
    /// Snapshots that are not sent because the target has others of their names.
    pub clashes: Vec<String>,
}

/// Whether two are the same snapshot.
fn is_same(a: &ReplicaPoint, b: &ReplicaPoint) -> bool {
    if a.identity.is_empty() || b.identity.is_empty() {
        return a.name == b.name && a.time_s == b.time_s;
    }
    a.identity == b.identity
}

/// Plans. Both lists have the oldest first; `target` is none where there is no such dataset.
pub fn plan_replication(source: &[ReplicaPoint], target: Option<&[ReplicaPoint]>, rules: ReplicaRules) -> Replication {
    let received = target.unwrap_or_default();
    let common = common_of(source, received, rules.order);
    let after = common.map_or(0, |(at, _)| at + 1);
    let base = common.map(|(at, _)| &source[at]);
    let is_new =
        |point: &&ReplicaPoint| point.kind == PointKind::Snapshot && base.is_none_or(|base| !is_same(base, point));
    let newer: Vec<&ReplicaPoint> = source[after..].iter().filter(is_new).collect();
    let clashes = |point: &ReplicaPoint| received.iter().any(|there| there.name == point.name);
    let clashing: Vec<String> = newer
        .iter()
        .filter(|point| point.is_wanted && clashes(point))
        .map(|point| point.name.clone())
        .collect();
    let mut is_sent: Vec<bool> = newer.iter().map(|point| point.is_wanted && !clashes(point)).collect();
    let behind_count = newer.iter().filter(|point| point.is_wanted).count();
    if rules.choice == Choice::Newest
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
        clashes: clashing,
    }
}

fn idle_without(source: &[ReplicaPoint]) -> Idle {
    if source.iter().any(|point| point.kind == PointKind::Snapshot) {
        Idle::NoneWanted
    } else {
        Idle::NoSnapshots
    }
}

/// The places of the newest snapshot of the target that the source knows: at the source, where a snapshot is better than a bookmark, and
/// at the target.
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
        _ if received.is_empty() => Some(Divergence::TargetIsNoCopy),
        None => Some(Divergence::NothingCommon),
        Some(at) if at + 1 < received.len() => Some(Divergence::TargetWentOn {
            common: received[at].name.clone(),
            own: received[at + 1..].iter().map(|point| point.name.clone()).collect(),
        }),
        Some(_) => None,
    }
}

/// The streams that bring what is sent of the snapshots newer than `base`.
fn steps(
    base: Option<&ReplicaPoint>,
    newer: &[&ReplicaPoint],
    is_sent: &[bool],
    rules: ReplicaRules,
) -> Vec<ReplicaStep> {
    let mut steps: Vec<ReplicaStep> = Vec::new();
    let mut base = base.map(|point| (point.name.clone(), point.kind));
    // Whether nothing lies between the snapshot and what the target has by then; a stream of several brings all that does.
    let mut is_next = true;
    // Whether the last stream can bring more: it begins with a snapshot that the target has.
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
