//! Banned calls, with the replacement for each, and the allowed exceptions.
//!
//! Clippy refuses some of these too, but allows exceptions anywhere in the code. Here all exceptions are in one table,
//! each with its reason.

use super::Finding;
use super::rust_text::{RustFile, is_word};

/// Text that must not occur in code.
pub(crate) struct Ban {
    text: &'static str,
    instead: &'static str,
    scope: Scope,
}

/// The code that a ban applies to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Scope {
    /// All code, including tests.
    Everywhere,
    /// All code that users run, and xtask.
    Production,
    /// Production code below the program: not `crates/cli`, not xtask.
    BelowCli,
}

/// An exception to a ban.
pub(crate) struct Allowed {
    /// A file, or a folder with `/` at the end.
    path: &'static str,
    text: &'static str,
    reason: &'static str,
}

const fn ban(text: &'static str, scope: Scope, instead: &'static str) -> Ban {
    Ban { text, instead, scope }
}

const PRINT: &str = "return a value or an event: only the program prints";
const ENVIRONMENT: &str = "take it as a parameter: only the program reads its environment";
const TIME: &str = "take the time, or a clock, as a parameter";
const ASYNC: &str = "use threads and bounded queues: the code is synchronous";

pub(crate) const BANS: &[Ban] = &[
    ban(
        "todo!",
        Scope::Everywhere,
        "write it, or leave it out and say so in the docs",
    ),
    ban(
        "unimplemented!",
        Scope::Everywhere,
        "return an error that says what is not supported",
    ),
    ban("dbg!", Scope::Everywhere, "take it out"),
    ban(
        "thread::sleep",
        Scope::Everywhere,
        "wait for the event itself, or take a clock",
    ),
    ban("SystemTime::now", Scope::Production, TIME),
    ban("Timestamp::now", Scope::Production, TIME),
    ban("Zoned::now", Scope::Production, TIME),
    ban("Instant::now", Scope::Production, TIME),
    ban("TimeZone::system", Scope::BelowCli, "take the time zone as a parameter"),
    ban(
        "Command::new",
        Scope::Production,
        "subprocesses are started in one place only",
    ),
    ban("process::exit", Scope::Production, "return: exit skips every clean-up"),
    ban(
        "fs::write",
        Scope::Production,
        "it does not sync: write through a store or a device",
    ),
    ban(
        ".unwrap()",
        Scope::Production,
        "return an error, or `expect` why it cannot fail",
    ),
    ban(
        "panic!",
        Scope::Production,
        "bad data is an error; a broken invariant is an assert",
    ),
    ban("async fn", Scope::Production, ASYNC),
    ban(".await", Scope::Production, ASYNC),
    ban("println!", Scope::BelowCli, PRINT),
    ban("print!", Scope::BelowCli, PRINT),
    ban("eprintln!", Scope::BelowCli, PRINT),
    ban("eprint!", Scope::BelowCli, PRINT),
    ban("env::var", Scope::BelowCli, ENVIRONMENT),
    ban("env::var_os", Scope::BelowCli, ENVIRONMENT),
    ban("env::args", Scope::BelowCli, ENVIRONMENT),
];

/// The exceptions. An exception that is not used any more is reported as a finding.
pub(crate) const ALLOWED: &[Allowed] = &[
    Allowed {
        path: "crates/block/src/clock.rs",
        text: "Instant::now",
        reason: "the one place that asks the machine for the time",
    },
    Allowed {
        path: "crates/cli/src/process/time.rs",
        text: "Timestamp::now",
        reason: "the one place that asks the machine for the date",
    },
    Allowed {
        path: "crates/block/src/clock.rs",
        text: "thread::sleep",
        reason: "the one place that waits",
    },
    Allowed {
        path: "crates/host/src/system/process/secrets.rs",
        text: "Command::new",
        reason: "the one place that starts subprocesses",
    },
    Allowed {
        path: "xtask/src/test/",
        text: "Command::new",
        reason: "it runs cargo and the tests",
    },
    Allowed {
        path: "crates/repo/tests/repository/store_crash.rs",
        text: "thread::sleep",
        reason: "the moment at which the child is killed is what the test varies",
    },
    Allowed {
        path: "crates/repo/tests/repository/kill.rs",
        text: "thread::sleep",
        reason: "the moment at which the child is killed is what the test varies",
    },
];

pub(crate) fn check(sources: &[RustFile], bans: &[Ban], allowed: &[Allowed]) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut used = vec![false; allowed.len()];
    for file in sources {
        for ban in bans
            .iter()
            .filter(|ban| ban.scope != Scope::BelowCli || is_below_cli(&file.path))
        {
            for line in places(file, ban) {
                let exception = allowed
                    .iter()
                    .position(|entry| entry.text == ban.text && covers(entry.path, &file.path));
                if let Some(index) = exception {
                    used[index] = true;
                } else {
                    let advice = format!("{} is banned: {}", ban.text, ban.instead);
                    findings.push(Finding::new(&file.path, line, "banned", advice));
                }
            }
        }
    }
    for (entry, _) in allowed.iter().zip(used).filter(|(_, used)| !used) {
        let Allowed { path, text, reason } = entry;
        let advice = format!("{path} has no {text} any more ({reason}): take it out of ALLOWED");
        findings.push(Finding::new("xtask/src/tidy/banned.rs", 0, "banned", advice));
    }
    findings
}

fn is_below_cli(path: &str) -> bool {
    path.starts_with("crates/") && !path.starts_with("crates/cli/")
}

fn covers(allowed: &str, path: &str) -> bool {
    path == allowed || (allowed.ends_with('/') && path.starts_with(allowed))
}

/// The lines of `file` that violate `ban`.
fn places<'a>(file: &'a RustFile, ban: &'a Ban) -> impl Iterator<Item = usize> + 'a {
    let starts_word = ban.text.starts_with(is_word);
    let ends_word = ban.text.ends_with(is_word);
    file.code
        .match_indices(ban.text)
        .filter(move |(offset, text)| {
            let continues = starts_word && file.code[..*offset].ends_with(is_word);
            let goes_on = ends_word && file.code[offset + text.len()..].starts_with(is_word);
            !continues && !goes_on
        })
        .map(|(offset, _)| file.line_of(offset))
        .filter(|line| ban.scope == Scope::Everywhere || !file.is_test(*line))
}

#[cfg(test)]
mod tests {
    use super::super::rust_text::{Purpose, RustFile};
    use super::{ALLOWED, Allowed, BANS, Finding, check};

    fn lines(path: &str, text: &str) -> Vec<usize> {
        let file = RustFile::new(path, text, Purpose::Production);
        check(&[file], BANS, &[])
            .into_iter()
            .map(|finding| finding.line)
            .collect()
    }

    #[test]
    fn every_banned_call_is_found_at_its_line_only() {
        for ban in BANS {
            let text = format!("fn f() {{\n    {}(x)\n}}\n", ban.text);
            assert_eq!(lines("crates/repo/src/a.rs", &text), [2], "{}", ban.text);
            let quoted = format!("// {0}\nconst A: &str = \"{0}\";\n", ban.text);
            assert_eq!(
                lines("crates/repo/src/a.rs", &quoted),
                Vec::<usize>::new(),
                "{}",
                ban.text
            );
        }
        assert_eq!(
            lines(
                "crates/repo/src/a.rs",
                "x.unwrap_or(1); my_println!(x); fs::write_all(x)"
            ),
            [] as [usize; 0]
        );
    }

    #[test]
    fn tests_may_unwrap_and_the_program_may_print() {
        let test = "#[cfg(test)]\nmod tests {\n    fn f() { x.unwrap(); dbg!(x) }\n}\n";
        let findings = lines("crates/repo/src/a.rs", test);
        assert_eq!(findings, [3], "only dbg!");
        assert_eq!(lines("crates/cli/src/main.rs", "println!()"), [] as [usize; 0]);
        assert_eq!(lines("crates/repo/src/a.rs", "println!()"), [1]);
    }

    #[test]
    fn an_exception_has_a_reason_and_is_used() {
        let entry = |path| Allowed {
            path,
            text: "Instant::now",
            reason: "the clock itself",
        };
        let file = || RustFile::new("crates/cli/src/clock.rs", "Instant::now()", Purpose::Production);
        assert_eq!(
            check(&[file()], BANS, &[entry("crates/cli/src/clock.rs")]),
            [] as [Finding; 0]
        );
        assert_eq!(check(&[file()], BANS, &[entry("crates/cli/")]), [] as [Finding; 0]);
        assert_eq!(
            check(&[file()], BANS, &[entry("crates/cli/src/main.rs")]).len(),
            2,
            "the call and the stale entry"
        );
        assert!(ALLOWED.iter().all(|entry| !entry.reason.is_empty()));
    }
}
