//! Selects the due jobs that may start while other jobs run.

use jiff::Timestamp;

use crate::Glob;

/// The resources of a job while it runs.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Claims {
    /// The repository, and the maximum number of jobs that may use it at once.
    pub repository: Option<(String, usize)>,
    /// Exclusive resources.
    pub resources: Vec<Resource>,
}

/// A resource that only one job uses at a time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Resource {
    /// The machine of this name.
    Machine(String),
    /// The machines whose names match.
    Machines(Glob),
    /// Machines whose names are unknown here: those with a tag.
    UnknownMachines,
    /// A machine of a pool, or several whose names are unknown here.
    PoolMachine {
        /// The name of the pool.
        host: String,
        /// The name of the machine, if it is a single one.
        machine: Option<String>,
    },
    /// Any other named resource: an image, a dataset, a kind of job.
    Other(String),
}

impl Resource {
    /// Whether both may be the same resource.
    fn overlaps(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Other(one), Self::Other(other)) | (Self::Machine(one), Self::Machine(other)) => one == other,
            (Self::Machine(name), Self::Machines(glob)) | (Self::Machines(glob), Self::Machine(name)) => {
                glob.matches(name)
            }
            (
                Self::PoolMachine { host, machine },
                Self::PoolMachine {
                    host: other_host,
                    machine: other,
                },
            ) => host == other_host && (machine.is_none() || other.is_none() || machine == other),
            (Self::PoolMachine { .. } | Self::Other(_), _) | (_, Self::PoolMachine { .. } | Self::Other(_)) => false,
            // Two patterns may always match the same name.
            _ => true,
        }
    }
}

impl Claims {
    /// Whether two jobs exclude each other.
    pub fn excludes(&self, other: &Self) -> bool {
        self.resources
            .iter()
            .any(|resource| other.resources.iter().any(|theirs| resource.overlaps(theirs)))
    }

    fn is_at(&self, repository: &str) -> bool {
        self.repository.as_ref().is_some_and(|(name, _)| name == repository)
    }
}

/// A job that is due.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StartCandidate<'c> {
    /// The job has been due since this time.
    pub since: Timestamp,
    /// The resources of the job.
    pub claims: &'c Claims,
}

/// The indices of the jobs that may start now, longest waiting first.
///
/// A waiting job reserves its resources, so that later jobs cannot starve it.
pub fn select_startable(candidates: &[StartCandidate<'_>], running: &[&Claims], at_once_max: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..candidates.len()).collect();
    order.sort_by_key(|index| candidates[*index].since);
    let mut busy: Vec<&Claims> = running.to_vec();
    let mut waiting: Vec<&Claims> = Vec::new();
    let mut chosen = Vec::new();
    for index in order {
        let claims = candidates[index].claims;
        let is_room_there = claims.repository.as_ref().is_none_or(|(name, most)| {
            let there = busy.iter().filter(|other| other.is_at(name)).count();
            there < *most
        });
        let is_excluded = busy.iter().chain(&waiting).any(|other| claims.excludes(other));
        if busy.len() < at_once_max && is_room_there && !is_excluded {
            busy.push(claims);
            chosen.push(index);
        } else {
            waiting.push(claims);
        }
    }
    chosen
}

#[cfg(test)]
mod tests {
    use jiff::Timestamp;

    use super::{Claims, Resource, StartCandidate, select_startable};
    use crate::Glob;

    fn claims(repository: Option<(&str, usize)>, resources: &[Resource]) -> Claims {
        Claims {
            repository: repository.map(|(name, most)| (name.to_owned(), most)),
            resources: resources.to_vec(),
        }
    }

    fn machine(name: &str) -> Resource {
        Resource::Machine(name.to_owned())
    }

    fn pattern(text: &str) -> Resource {
        Resource::Machines(Glob::parse(text).unwrap())
    }

    /// The indices of the candidates that may start, each due a second later than the one before.
    fn choose(candidates: &[&Claims], running: &[&Claims], at_once: usize) -> Vec<usize> {
        let candidates = candidates.iter().enumerate().map(|(index, claims)| StartCandidate {
            since: Timestamp::from_second(i64::try_from(index).unwrap()).unwrap(),
            claims,
        });
        select_startable(&candidates.collect::<Vec<_>>(), running, at_once)
    }

    /// A pool that hangs does not block jobs of another pool, or of libvirt.
    #[test]
    fn pools_are_apart() {
        let of_pool = |host: &str, machine: Option<&str>| {
            let (host, machine) = (host.to_owned(), machine.map(str::to_owned));
            claims(None, &[Resource::PoolMachine { host, machine }])
        };
        let (all, web1, db1) = (
            of_pool("one", None),
            of_pool("one", Some("web1")),
            of_pool("one", Some("db1")),
        );
        assert!(all.excludes(&all) && all.excludes(&web1) && web1.excludes(&all) && web1.excludes(&web1));
        assert!(!web1.excludes(&db1));
        let others = [
            of_pool("two", None),
            of_pool("two", Some("web1")),
            claims(None, &[Resource::UnknownMachines]),
            claims(None, &[machine("web1")]),
        ];
        for other in &others {
            assert!(!all.excludes(other) && !other.excludes(&web1), "{other:?}");
        }
    }

    #[test]
    fn a_machine_is_used_by_one_job_at_a_time() {
        let (web1, web2, db) = (
            claims(None, &[machine("web1")]),
            claims(None, &[machine("web2")]),
            claims(None, &[machine("db")]),
        );
        let (webs, tagged) = (
            claims(None, &[pattern("web*")]),
            claims(None, &[Resource::UnknownMachines]),
        );
        let image = claims(None, &[Resource::Other("/a.raw".to_owned())]);
        assert_eq!(choose(&[&web1, &web2, &db, &image], &[], 9), [0, 1, 2, 3]);
        assert_eq!(choose(&[&web1, &web1], &[], 9), [0]);
        assert_eq!(choose(&[&web1, &webs, &db], &[], 9), [0, 2]);
        assert_eq!(choose(&[&tagged, &image], &[&db], 9), [1]);
        assert_eq!(choose(&[&webs, &image], &[&claims(None, &[pattern("*1")])], 9), [1]);
        assert_eq!(choose(&[&image], &[&image], 9), [0; 0]);
    }

    #[test]
    fn limits_hold_overall_and_at_a_repository() {
        let (one, two) = (claims(Some(("a", 1)), &[]), claims(Some(("b", 2)), &[]));
        assert_eq!(choose(&[&one, &one, &two, &two, &two], &[], 9), [0, 2, 3]);
        assert_eq!(choose(&[&one, &two], &[&two, &two], 9), [0]);
        assert_eq!(choose(&[&one, &two, &two], &[], 2), [0, 1]);
        assert_eq!(choose(&[&one], &[&two], 1), [0; 0]);
    }

    #[test]
    fn a_job_that_waits_for_all_machines_does_not_starve() {
        let (web1, all, web2) = (
            claims(None, &[machine("web1")]),
            claims(None, &[pattern("*")]),
            claims(None, &[machine("web2")]),
        );
        assert_eq!(choose(&[&all, &web2], &[&web1], 9), [0; 0]);
        assert_eq!(choose(&[&web2, &all], &[&web1], 9), [0]);
    }
}
