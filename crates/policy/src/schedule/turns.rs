//! Which of the jobs that are due may start, beside those that run.

use jiff::Timestamp;

use crate::Glob;

/// What a job uses while it runs.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Claims {
    /// The repository, and how many jobs may work on it at once.
    pub repository: Option<(String, usize)>,
    /// What nobody else may use meanwhile.
    pub things: Vec<Thing>,
}

/// Something that only one job uses at a time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Thing {
    /// A machine of that name.
    Machine(String),
    /// Machines that match.
    Machines(Glob),
    /// Machines that nobody can tell the names of here: those with a tag.
    SomeMachines,
    /// A machine of a pool, or some that nobody can tell the names of.
    OfPool {
        /// What the pool is called.
        host: String,
        /// Its name there, if one is meant.
        machine: Option<String>,
    },
    /// Anything else, known by its name: an image, a dataset, a kind of job.
    Other(String),
}

impl Thing {
    /// Whether both may be the same.
    fn may_be(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Other(one), Self::Other(other)) | (Self::Machine(one), Self::Machine(other)) => one == other,
            (Self::Machine(name), Self::Machines(glob)) | (Self::Machines(glob), Self::Machine(name)) => {
                glob.matches(name)
            }
            (
                Self::OfPool { host, machine },
                Self::OfPool {
                    host: other_host,
                    machine: other,
                },
            ) => host == other_host && (machine.is_none() || other.is_none() || machine == other),
            (Self::OfPool { .. } | Self::Other(_), _) | (_, Self::OfPool { .. } | Self::Other(_)) => false,
            // Whether two patterns have a name in common depends on names that are not there yet.
            _ => true,
        }
    }
}

impl Claims {
    /// Whether both may run at once, as far as things are concerned.
    pub fn exclude(&self, other: &Self) -> bool {
        self.things
            .iter()
            .any(|thing| other.things.iter().any(|theirs| thing.may_be(theirs)))
    }

    fn is_at(&self, repository: &str) -> bool {
        self.repository.as_ref().is_some_and(|(name, _)| name == repository)
    }
}

/// A job that is due.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Candidate<'c> {
    /// Since when.
    pub since: Timestamp,
    /// What it uses.
    pub claims: &'c Claims,
}

/// The candidates that may start now, by their index: those that wait longest first.
///
/// Who has to wait for a machine keeps it from those that came later, so that nobody waits for ever.
pub fn turns(candidates: &[Candidate<'_>], running: &[&Claims], at_once_max: usize) -> Vec<usize> {
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
        let is_excluded = busy.iter().chain(&waiting).any(|other| claims.exclude(other));
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

    use super::{Candidate, Claims, Thing, turns};
    use crate::Glob;

    fn claims(repository: Option<(&str, usize)>, things: &[Thing]) -> Claims {
        Claims {
            repository: repository.map(|(name, most)| (name.to_owned(), most)),
            things: things.to_vec(),
        }
    }

    fn machine(name: &str) -> Thing {
        Thing::Machine(name.to_owned())
    }

    fn pattern(text: &str) -> Thing {
        Thing::Machines(Glob::parse(text).unwrap())
    }

    /// Who of the candidates, each a second younger than the one before, may start.
    fn choose(candidates: &[&Claims], running: &[&Claims], at_once: usize) -> Vec<usize> {
        let candidates = candidates.iter().enumerate().map(|(index, claims)| Candidate {
            since: Timestamp::from_second(i64::try_from(index).unwrap()).unwrap(),
            claims,
        });
        turns(&candidates.collect::<Vec<_>>(), running, at_once)
    }

    /// A pool that hangs holds up nobody who is at work on another one, or on machines of libvirt.
    #[test]
    fn pools_are_apart() {
        let of_pool = |host: &str, machine: Option<&str>| {
            let (host, machine) = (host.to_owned(), machine.map(str::to_owned));
            claims(None, &[Thing::OfPool { host, machine }])
        };
        let (all, web1, db1) = (
            of_pool("one", None),
            of_pool("one", Some("web1")),
            of_pool("one", Some("db1")),
        );
        assert!(all.exclude(&all) && all.exclude(&web1) && web1.exclude(&all) && web1.exclude(&web1));
        assert!(!web1.exclude(&db1));
        let others = [
            of_pool("two", None),
            of_pool("two", Some("web1")),
            claims(None, &[Thing::SomeMachines]),
            claims(None, &[machine("web1")]),
        ];
        for other in &others {
            assert!(!all.exclude(other) && !other.exclude(&web1), "{other:?}");
        }
    }

    #[test]
    fn a_machine_is_used_by_one_job_at_a_time() {
        let (web1, web2, db) = (
            claims(None, &[machine("web1")]),
            claims(None, &[machine("web2")]),
            claims(None, &[machine("db")]),
        );
        let (webs, tagged) = (claims(None, &[pattern("web*")]), claims(None, &[Thing::SomeMachines]));
        let image = claims(None, &[Thing::Other("/a.raw".to_owned())]);
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
    fn who_waits_for_all_machines_is_not_overtaken_for_ever() {
        let (web1, all, web2) = (
            claims(None, &[machine("web1")]),
            claims(None, &[pattern("*")]),
            claims(None, &[machine("web2")]),
        );
        assert_eq!(choose(&[&all, &web2], &[&web1], 9), [0; 0]);
        assert_eq!(choose(&[&web2, &all], &[&web1], 9), [0]);
    }
}
