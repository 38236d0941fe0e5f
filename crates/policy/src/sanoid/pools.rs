//! Whether pools are healthy and have free space, with the output of the Nagios checks `sanoid --monitor-health` and
//! `--monitor-capacity`.

use std::collections::BTreeMap;

use super::check::{Check, Level, one_line};
use super::{DatasetPolicy, ResolvedDatasets};

/// The state of a pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PoolStatus {
    /// The pool exists.
    Present(PoolFacts),
    /// There is no such pool.
    Missing,
    /// The state could not be determined, for this reason.
    Unknown(String),
}

/// A pool, in ZFS's terms.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PoolFacts {
    /// `ONLINE`, `DEGRADED`, `FAULTED` and the like.
    pub health: String,
    /// The size: `3.62T`.
    pub size: String,
    /// The free space.
    pub free: String,
    /// The fill level: `45%`; `-` for a pool that cannot be opened.
    pub capacity: String,
    /// The devices, from top to bottom; the capacity check does not need them.
    pub devices: Vec<PoolDevice>,
}

/// A device of a pool: a disk or a mirror.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolDevice {
    /// The depth below the pool: 1 for a mirror, 2 for a disk in it.
    pub depth: usize,
    /// The name.
    pub name: String,
    /// `ONLINE`, `UNAVAIL` and the like.
    pub state: String,
    /// Whether reading failed.
    pub has_read_errors: bool,
    /// Whether writing failed.
    pub has_write_errors: bool,
    /// Whether checksums did not match.
    pub has_checksum_errors: bool,
}

/// Limits of the fill level, in percent; `None` for no limit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CapacityLimits {
    /// The level for a warning.
    pub warning: Option<u32>,
    /// The level for a critical problem.
    pub critical: Option<u32>,
}

/// Checks the health of pools, by name.
pub fn health(pools: &BTreeMap<String, PoolStatus>) -> Check {
    if pools.is_empty() {
        return Check::unknown("the policy concerns no pool");
    }
    summary(
        pools
            .iter()
            .map(|(name, answer)| finding(name, answer, |facts| Some(health_of(name, facts)))),
    )
}

/// Checks the capacity of pools, by name; pools without a limit are always OK.
pub fn capacity(pools: &BTreeMap<String, (CapacityLimits, PoolStatus)>) -> Check {
    if pools.is_empty() {
        return Check {
            level: Level::Ok,
            line: "OK: no pool of the policy has a limit".to_owned(),
        };
    }
    summary(pools.iter().map(|(name, (limits, answer))| {
        finding(name, answer, |facts| {
            let level = capacity_of(*limits, facts)?;
            Some((level, format!("ZPOOL {name} : {}", facts.capacity)))
        })
    }))
}

/// The fill level in percent; `None` if the text is invalid.
pub fn percent(capacity: &str) -> Option<u32> {
    let digits = capacity.strip_suffix('%')?;
    let is_number = (1..=3).contains(&digits.len()) && digits.bytes().all(|byte| byte.is_ascii_digit());
    digits.parse().ok().filter(|_| is_number)
}

impl ResolvedDatasets {
    /// The pools of all datasets in the policy.
    pub fn pools(&self) -> Vec<String> {
        let mut pools: Vec<String> = self.datasets.iter().map(|policy| policy.pool().to_owned()).collect();
        pools.sort();
        pools.dedup();
        pools
    }

    /// The capacity limits of pools that have one.
    ///
    /// If the root dataset of a pool has a setting, that setting counts. Otherwise the lowest limit of the datasets in
    /// the pool counts.
    pub fn capacity_limits(&self) -> BTreeMap<String, CapacityLimits> {
        let mut limits: BTreeMap<String, CapacityLimits> = BTreeMap::new();
        for policy in &self.datasets {
            let own = policy.capacity_limits();
            let so_far = limits.entry(policy.pool().to_owned()).or_default();
            so_far.warning = lower(so_far.warning, own.warning);
            so_far.critical = lower(so_far.critical, own.critical);
        }
        for policy in &self.datasets {
            let own = policy.capacity_limits();
            if policy.dataset == policy.pool() && own != CapacityLimits::default() {
                limits.insert(policy.dataset.clone(), own);
            }
        }
        limits.retain(|_, limits| *limits != CapacityLimits::default());
        limits
    }
}

fn lower(one: Option<u32>, other: Option<u32>) -> Option<u32> {
    one.into_iter().chain(other).min()
}

impl DatasetPolicy {
    /// The pool of the dataset.
    pub fn pool(&self) -> &str {
        self.dataset.split('/').next().unwrap_or_default()
    }

    fn capacity_limits(&self) -> CapacityLimits {
        let limit = |key| Some(self.number(key)).filter(|percent| *percent > 0);
        CapacityLimits {
            warning: limit("capacity_warn"),
            critical: limit("capacity_crit"),
        }
    }
}

/// The result for one pool, and its position in the output.
struct Finding {
    order: FindingOrder,
    level: Level,
    words: String,
}

#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum FindingOrder {
    /// A missing pool is listed first, and without the severity marker, as in sanoid.
    Missing,
    /// An unknown state is listed like the most severe one.
    Unknown,
    Known,
}

fn finding(name: &str, answer: &PoolStatus, look: impl Fn(&PoolFacts) -> Option<(Level, String)>) -> Finding {
    let missing = || Finding {
        order: FindingOrder::Missing,
        level: Level::Critical,
        words: format!("CRITICAL ZPOOL {{{name}}} does not exist and/or is not responding!"),
    };
    match answer {
        PoolStatus::Present(facts) => match look(facts) {
            Some((level, words)) => Finding {
                order: FindingOrder::Known,
                level,
                words: format!("{} {words}", level.word()),
            },
            None => missing(),
        },
        PoolStatus::Missing => missing(),
        PoolStatus::Unknown(reason) => Finding {
            order: FindingOrder::Unknown,
            level: Level::Unknown,
            words: format!("UNKNOWN ZPOOL {name} : {}", one_line(reason)),
        },
    }
}

fn summary(findings: impl Iterator<Item = Finding>) -> Check {
    let mut findings: Vec<Finding> = findings.collect();
    findings.sort_by(|one, other| one.order.cmp(&other.order));
    let level = findings
        .iter()
        .map(|finding| finding.level)
        .max()
        .unwrap_or(Level::Unknown);
    let is_missing = findings
        .first()
        .is_some_and(|finding| finding.order == FindingOrder::Missing);
    let sign = match level {
        Level::Warning => "*** WARNING *** ",
        Level::Critical if !is_missing => "*** CRITICAL *** ",
        Level::Ok | Level::Unknown | Level::Critical => "",
    };
    let words: Vec<String> = findings.into_iter().map(|finding| finding.words).collect();
    Check {
        level,
        line: format!("{sign}{}", words.join(", ")),
    }
}

fn capacity_of(limits: CapacityLimits, facts: &PoolFacts) -> Option<Level> {
    let percent = percent(&facts.capacity)?;
    let is_reached = |limit: Option<u32>| limit.is_some_and(|limit| percent >= limit);
    Some(match (is_reached(limits.critical), is_reached(limits.warning)) {
        (true, _) => Level::Critical,
        (false, true) => Level::Warning,
        (false, false) => Level::Ok,
    })
}

fn health_of(name: &str, facts: &PoolFacts) -> (Level, String) {
    let mut level = match &facts.health[..] {
        "ONLINE" => Level::Ok,
        "DEGRADED" => Level::Warning,
        _ => Level::Critical,
    };
    let mut devices = Vec::new();
    for device in &facts.devices {
        // A pool can be online although one of its devices is not, such as a cache.
        if level == Level::Ok && device.state == "UNAVAIL" {
            level = Level::Warning;
        }
        let is_at_work = ["ONLINE", "AVAIL", "INUSE"].contains(&&device.state[..]);
        if level == Level::Ok || is_at_work {
            let errors = device.errors();
            if !errors.is_empty() {
                devices.push(format!("({}:{} errors) ", device.name, errors.join(", ")));
                level = level.max(Level::Warning);
            }
            continue;
        }
        let (name, state) = (&device.name, &device.state);
        devices.push(match device.depth {
            1 => format!("<{name}:{state}> "),
            3 => format!("({name}:{state}) "),
            _ => format!("{name}:{state} "),
        });
    }
    let PoolFacts {
        health,
        size,
        free,
        capacity,
        ..
    } = facts;
    let words = format!(
        "ZPOOL {name} : {health} {{Size:{size} Free:{free} Cap:{capacity}}} {}",
        devices.concat()
    );
    (level, words)
}

impl PoolDevice {
    fn errors(&self) -> Vec<&'static str> {
        let all = [
            (self.has_read_errors, "read"),
            (self.has_write_errors, "write"),
            (self.has_checksum_errors, "cksum"),
        ];
        all.into_iter().filter(|(has, _)| *has).map(|(_, word)| word).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::{CapacityLimits, PoolDevice, PoolFacts, PoolStatus, capacity, health, percent};
    use crate::sanoid::{Check, Level, SanoidConfig};

    fn pool(health: &str, capacity: &str, devices: &[(usize, &str, &str, u64)]) -> PoolStatus {
        let device = |(depth, name, state, errors): &(usize, &str, &str, u64)| PoolDevice {
            depth: *depth,
            name: (*name).to_owned(),
            state: (*state).to_owned(),
            has_read_errors: *errors > 0,
            has_write_errors: false,
            has_checksum_errors: *errors > 1,
        };
        PoolStatus::Present(PoolFacts {
            health: health.to_owned(),
            size: "1T".to_owned(),
            free: "2G".to_owned(),
            capacity: capacity.to_owned(),
            devices: devices.iter().map(device).collect(),
        })
    }

    fn healths(pools: impl IntoIterator<Item = (&'static str, PoolStatus)>) -> (Level, String) {
        let Check { level, line } = health(&pools.into_iter().map(|(name, pool)| (name.to_owned(), pool)).collect());
        (level, line)
    }

    #[test]
    fn pools_are_reported_with_the_devices_that_are_not_well() {
        let degraded = [
            (1, "mirror-0", "DEGRADED", 0),
            (2, "a", "ONLINE", 2),
            (2, "b", "UNAVAIL", 0),
        ];
        let line = "*** WARNING *** OK ZPOOL a : ONLINE {Size:1T Free:2G Cap:3%} , \
                    WARNING ZPOOL b : DEGRADED {Size:1T Free:2G Cap:4%} <mirror-0:DEGRADED> (a:read, cksum errors) b:UNAVAIL ";
        let pools = [
            ("a", pool("ONLINE", "3%", &[(1, "x", "OFFLINE", 0)])),
            ("b", pool("DEGRADED", "4%", &degraded)),
        ];
        assert_eq!(healths(pools), (Level::Warning, line.to_owned()));
        for health in ["FAULTED", "UNAVAIL", "SUSPENDED", "online", ""] {
            assert_eq!(
                healths([("a", pool(health, "-", &[]))]).0,
                Level::Critical,
                "{health:?}"
            );
        }
    }

    #[test]
    fn an_unknown_state_is_never_ok() {
        let unknown = || PoolStatus::Unknown("it is | silent".to_owned());
        let well = || pool("ONLINE", "3%", &[]);
        let (level, line) = healths([("a", well()), ("b", unknown())]);
        assert_eq!(level, Level::Unknown);
        assert!(
            line.starts_with("UNKNOWN ZPOOL b : it is / silent, OK ZPOOL a"),
            "{line}"
        );
        let (level, line) = healths([("a", unknown()), ("b", pool("FAULTED", "-", &[]))]);
        assert_eq!(level, Level::Critical);
        assert!(line.starts_with("*** CRITICAL *** UNKNOWN ZPOOL a"), "{line}");
        let (level, line) = healths([("a", well()), ("b", PoolStatus::Missing)]);
        assert_eq!(level, Level::Critical);
        let missing = "CRITICAL ZPOOL {b} does not exist and/or is not responding!, OK ZPOOL a";
        assert!(line.starts_with(missing), "{line}");
        assert_eq!(healths([]).0, Level::Unknown);
    }

    #[test]
    fn pools_may_be_as_full_as_their_limits_say() {
        let level_of = |warning, critical, said: &str| {
            let limits = CapacityLimits { warning, critical };
            let pools = BTreeMap::from([("a".to_owned(), (limits, pool("ONLINE", said, &[])))]);
            let Check { level, line } = capacity(&pools);
            (level, line)
        };
        assert_eq!(
            level_of(Some(80), Some(95), "79%"),
            (Level::Ok, "OK ZPOOL a : 79%".to_owned())
        );
        let warning = "*** WARNING *** WARNING ZPOOL a : 80%";
        assert_eq!(
            level_of(Some(80), Some(95), "80%"),
            (Level::Warning, warning.to_owned())
        );
        assert_eq!(level_of(Some(80), None, "100%").0, Level::Warning);
        assert_eq!(level_of(Some(80), Some(95), "95%").0, Level::Critical);
        for nonsense in ["-", "", "%", "1000%", "5", "+5%", "5 %"] {
            assert_eq!(percent(nonsense), None);
            assert_eq!(level_of(Some(80), None, nonsense).0, Level::Critical);
        }
        assert_eq!(capacity(&BTreeMap::new()).level, Level::Ok);
    }

    #[test]
    fn the_limits_of_the_root_count_and_else_the_lowest() {
        let text = "[tank]\ncapacity_warn=70\ncapacity_crit=0\n[tank/a]\ncapacity_warn=10\n\
                    [data/a]\ncapacity_warn=60\n[data/b]\ncapacity_crit=90\ncapacity_warn=0\n\
                    [none]\ncapacity_warn=0\ncapacity_crit=0\n";
        let resolved = SanoidConfig::parse(text).unwrap().resolve(&[]);
        let limits = |warning, critical| CapacityLimits { warning, critical };
        let wanted = [
            ("data".to_owned(), limits(Some(60), Some(90))),
            ("tank".to_owned(), limits(Some(70), None)),
        ];
        assert_eq!(resolved.capacity_limits(), BTreeMap::from(wanted));
        assert_eq!(resolved.pools(), ["data", "none", "tank"]);
    }
}
