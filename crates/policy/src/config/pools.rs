//! Configured pools of XenServer and XCP-ng: address, login, certificates, and the transfer mode of disks.

use super::document::Section;
use super::form::Value;
use super::kinds::JobKind;
use super::{ConfigError, keys};
use crate::config::values::{Values, count, place, text, values_of};

/// Prefix of the address of a pool.
const SCHEME: &str = "xen://";

/// A pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfiguredPool {
    /// The name in jobs and on command lines: `xen://NAME/web1`.
    pub name: String,
    /// The line of its section.
    pub line: u32,
    /// The host, with its port if that is not the port of HTTPS.
    pub address: String,
    /// The line of the address, or that of the section.
    pub address_line: u32,
    /// The user, if the address names none.
    pub user: Option<String>,
    /// The file whose first line is the password.
    pub password_file: Option<String>,
    /// The command whose first line of output is the password.
    pub password_command: Option<String>,
    /// Fingerprints of the certificates of the pool's hosts.
    pub certificates: Vec<String>,
    /// The line of the certificates.
    pub certificates_line: u32,
    /// The file with the certificate authorities of the pool's hosts.
    pub authorities: Option<String>,
    /// The transfer mode of disks.
    pub read: Option<String>,
    /// Number of simultaneous connections for one disk.
    pub connections: Option<usize>,
    /// Whether no snapshot is kept in the pool as the base of the next backup.
    pub keeps_nothing: Option<bool>,
}

/// The parts of `xen://[USER@]HOST[/ITEM]`.
struct Parts<'w> {
    user: Option<&'w str>,
    host: &'w str,
    /// Begins with `/`; empty if there is no item.
    item: &'w str,
}

/// Whether a word names machines of a pool.
pub(super) fn names_pool_machines(word: &str) -> bool {
    word.starts_with(SCHEME)
}

fn parts(word: &str) -> Option<Parts<'_>> {
    let rest = word.strip_prefix(SCHEME)?;
    let (authority, item) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
    let (user, host) = match authority.rsplit_once('@') {
        Some((user, host)) => (Some(user), host),
        None => (None, authority),
    };
    Some(Parts { user, host, item })
}

/// The pool in a word: a name, or the address of a host.
fn host_of(word: &str) -> Option<&str> {
    parts(word).map(|parts| parts.host)
}

/// Whether a word may match several machines of its pool.
pub(super) fn may_match_several(word: &str) -> bool {
    parts(word).is_none_or(|parts| {
        let item = parts.item.trim_start_matches('/');
        item.is_empty() || item.starts_with("tag:") || crate::Glob::is_one(item)
    })
}

/// The pool in a word, and the machine, if it is a single one.
pub(super) fn pool_and_machine(word: &str) -> Option<(String, Option<String>)> {
    let parts = parts(word)?;
    let machine = parts.item.trim_start_matches('/').to_owned();
    Some((
        parts.host.to_owned(),
        Some(machine).filter(|_| !may_match_several(word)),
    ))
}

impl ConfiguredPool {
    pub(super) fn read(section: &Section, errors: &mut Vec<ConfigError>) -> Self {
        let values = values_of(section, keys::POOL, errors);
        let name = section.name.clone().unwrap_or_default();
        let line_of = |key: &str| values.get(key).map_or(section.line, |(line, _)| *line);
        if let (Some(_), Some((line, _))) = (values.get("password_file"), values.get("password_command")) {
            errors.push(ConfigError::Together {
                line: *line,
                place: place(section),
                what: "password_file and password_command are both given, and only one can hold the password"
                    .to_owned(),
            });
        }
        let address = text(&values, "address").unwrap_or_else(|| name.clone());
        for (key, word) in [("address", Some(&address)), ("user", text(&values, "user").as_ref())] {
            // Reject characters that would become another part of the address.
            if word.is_some_and(|word| word.contains(|c: char| "/@".contains(c) || c.is_whitespace() || c.is_control()))
            {
                errors.push(ConfigError::Value {
                    line: line_of(key),
                    place: place(section),
                    key: key.to_owned(),
                    wanted: if key == "address" {
                        "a host, with a port or without: \"xen1.example.org\", \"xen1:8443\"; the user stands in user"
                    } else {
                        "a user name without other parts"
                    }
                    .to_owned(),
                });
            }
        }
        Self {
            line: section.line,
            address_line: line_of("address"),
            address,
            name,
            user: text(&values, "user"),
            password_file: text(&values, "password_file"),
            password_command: text(&values, "password_command"),
            certificates: values
                .get("certificate")
                .map(|(_, value)| value.texts().to_vec())
                .unwrap_or_default(),
            certificates_line: line_of("certificate"),
            authorities: text(&values, "authorities"),
            read: text(&values, "read"),
            connections: count(&values, "connections"),
            keeps_nothing: match values.get("keep_nothing") {
                Some((_, Value::Flag(flag))) => Some(*flag),
                _ => None,
            },
        }
    }

    /// Replaces the name of the pool in a word by the pool's address.
    pub fn addressed(&self, word: &str) -> Option<String> {
        let parts = parts(word).filter(|parts| parts.host == self.name)?;
        let user = parts.user.or(self.user.as_deref());
        let user = user.map(|user| format!("{user}@")).unwrap_or_default();
        Some(format!("{SCHEME}{user}{}{}", self.address, parts.item))
    }

    /// The login options of a job.
    pub(super) fn login_words(&self) -> Vec<String> {
        let mut words = Vec::new();
        let mut add = |option: &str, value: Option<String>| {
            words.extend(value.into_iter().flat_map(|value| [option.to_owned(), value]));
        };
        add("--pool-password-file", self.password_file.clone());
        add("--pool-password-command", self.password_command.clone());
        for certificate in &self.certificates {
            add("--pool-certificate", Some(certificate.clone()));
        }
        add("--pool-authorities", self.authorities.clone());
        words
    }

    /// The options of a backup that come from the pool's other settings.
    pub(super) fn words(&self) -> Vec<String> {
        let mut words = self.login_words();
        let mut add = |option: &str, value: Option<String>| {
            words.extend(value.into_iter().flat_map(|value| [option.to_owned(), value]));
        };
        add("--pool-read", self.read.clone());
        add("--pool-connections", self.connections.map(|count| count.to_string()));
        if self.keeps_nothing == Some(true) {
            words.push("--pool-keep-nothing".to_owned());
        }
        words
    }
}

/// The machines that a job names.
fn machines(own: &Values) -> impl Iterator<Item = &String> {
    let value = own.get("machines").map(|(_, value)| value.texts());
    value.unwrap_or_default().iter()
}

/// Whether a job is for machines of a pool.
pub(super) fn is_pool_job(own: &Values) -> bool {
    machines(own).any(|word| names_pool_machines(word))
}

/// Whether a setting of a backup concerns QEMU guests and does not apply to pools.
pub(super) fn is_guest_setting(key: &str) -> bool {
    ["quiesce", "method", "scratch", "scratch_max", "max_latency"].contains(&key)
}

/// Checks the machines of pools in a job. All must be in one pool, because a command line has one password; a job with
/// them has no other machines, and no settings that do not apply to pools. Returns the name of the pool, if it is
/// configured.
pub(super) fn of_job(
    section: &Section,
    kind: &JobKind,
    own: &Values,
    known: &[ConfiguredPool],
    errors: &mut Vec<ConfigError>,
) -> Option<String> {
    let first = machines(own).find(|word| names_pool_machines(word))?;
    let line = own.get("machines").map_or(section.line, |(line, _)| *line);
    let mut wrong = |line: u32, what: String| {
        errors.push(ConfigError::Together {
            line,
            place: place(section),
            what,
        });
    };
    if !["backup", "doctor"].contains(&kind.name) {
        let what = "machines of pools can only be backed up, and examined by doctor; name their snapshots by the machine's name alone";
        wrong(line, what.to_owned());
        return None;
    }
    let host = host_of(first);
    if let Some(other) = machines(own).find(|word| host_of(word) != host) {
        wrong(
            line,
            format!("{first} and {other} cannot be in one job: use one job for each pool, and one for other machines"),
        );
    }
    for (key, (line, value)) in own.iter().filter(|(key, _)| is_guest_setting(key)) {
        // Pools cannot freeze file systems, so `try` has the effect of `off`.
        if !(key == "quiesce" && value.texts().iter().all(|how| how != "require")) {
            wrong(*line, format!("{key} does not apply to pools"));
        }
    }
    let named = known.iter().find(|pool| Some(&pool.name[..]) == host);
    named.map(|pool| pool.name.clone())
}
