//! The kinds of jobs: one entry for each, with the mapping from its settings to a command line.
//!
//! A setting has the name of the command's option, with `_` for `-`. To add a kind, add an entry to [`KINDS`]; a test
//! of the program checks all entries against its command line parser.

use super::form::{Form, Value};

/// A kind of job.
#[derive(Debug, PartialEq, Eq)]
pub struct JobKind {
    /// The value of `do =`.
    pub name: &'static str,
    /// The words of the command.
    pub verb: &'static [&'static str],
    /// Whether the kind uses a repository.
    pub needs_repository: bool,
    /// Settings that say what the job works on: at least one of them is required.
    pub(super) needs_one_of: &'static [&'static str],
    /// The resources that the job uses exclusively.
    pub(super) claim: Claim,
    /// How to interpret the exit code.
    pub exit_codes: ExitCodeScheme,
    pub(super) options: &'static [JobOption],
}

/// The resources that a job uses exclusively while it runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Claim {
    /// Nothing: any number of these jobs run at the same time.
    Nothing,
    /// The machines, images and datasets that its settings name.
    Machines,
    /// Other jobs of the same kind are excluded.
    Kind,
}

/// How to interpret the exit code of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExitCodeScheme {
    /// As in `docs/exit-codes.md`.
    Verb,
    /// As a Nagios check: 1 is a warning, 2 critical, 3 unknown.
    Check,
    /// The output names machines whose newest snapshot is too old.
    Freshness,
}

/// A setting that becomes arguments.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct JobOption {
    pub(super) key: &'static str,
    pub(super) form: Form,
    pub(super) words: Words,
}

/// The form of the arguments of a setting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Words {
    /// Operands, after all options.
    Positional,
    /// The option and its value; repeated for each of several values.
    Option(&'static str),
    /// `--option=value`.
    Joined(&'static str),
    /// The option alone, if the value is true.
    Flag(&'static str),
}

const fn names(key: &'static str) -> JobOption {
    JobOption {
        key,
        form: Form::Texts,
        words: Words::Positional,
    }
}

/// A positional operand.
const fn place(key: &'static str) -> JobOption {
    JobOption {
        key,
        form: Form::Text,
        words: Words::Positional,
    }
}

const fn option(key: &'static str, form: Form, option: &'static str) -> JobOption {
    JobOption {
        key,
        form,
        words: Words::Option(option),
    }
}

const fn flag(key: &'static str, option: &'static str) -> JobOption {
    JobOption {
        key,
        form: Form::Flag,
        words: Words::Flag(option),
    }
}

/// Concatenates several lists, of `N` elements in all.
const fn joined<const N: usize>(lists: &[&[JobOption]]) -> [JobOption; N] {
    let mut all = [THREADS; N];
    let (mut count, mut list) = (0, 0);
    while list < lists.len() {
        let mut at = 0;
        while at < lists[list].len() {
            all[count] = lists[list][at];
            count += 1;
            at += 1;
        }
        list += 1;
    }
    assert!(count == N, "the lists have N elements");
    all
}

const fn count(max: u64) -> Form {
    Form::Count { min: 0, max }
}

const MANY: Form = count(1_000_000);
const CONNECT: JobOption = option("connect", Form::Text, "--connect");
const QUIESCE: JobOption = option("quiesce", Form::OneOf(&["try", "require", "off"]), "--quiesce");
const THREADS: JobOption = option("threads", Form::Count { min: 1, max: 1024 }, "--threads");

const MEMORY: JobOption = JobOption {
    key: "with_memory",
    form: Form::OneOf(&["auto", "live", "stopped"]),
    words: Words::Joined("--with-memory"),
};
const STATES: JobOption = option("states", Form::Path, "--states");

/// The retention rules, in jobs and in `[retention.NAME]`.
pub(super) const KEEP: &[JobOption] = &[
    option("keep_last", MANY, "--keep-last"),
    option("keep_hourly", MANY, "--keep-hourly"),
    option("keep_daily", MANY, "--keep-daily"),
    option("keep_weekly", MANY, "--keep-weekly"),
    option("keep_monthly", MANY, "--keep-monthly"),
    option("keep_yearly", MANY, "--keep-yearly"),
    option("keep_within", Form::Span, "--keep-within"),
    option("keep_tag", Form::Texts, "--keep-tag"),
];

const BACKUP: &[JobOption] = &[
    names("machines"),
    names("images"),
    flag("all", "--all"),
    option("exclude_machine", Form::Texts, "--exclude-machine"),
    option("include", Form::Texts, "--include"),
    option("exclude", Form::Texts, "--exclude"),
    option("machine", Form::Text, "--machine"),
    option("tag", Form::Texts, "--tag"),
    option("format", Form::OneOf(&["raw", "qcow2"]), "--format"),
    option("allow", Form::Texts, "--allow"),
    CONNECT,
    QUIESCE,
    MEMORY,
    option(
        "method",
        Form::OneOf(&["filter", "reflink", "overlay", "pause", "snapshot"]),
        "--method",
    ),
    option("scratch", Form::Path, "--scratch"),
    option("scratch_max", Form::Text, "--scratch-max"),
    option("bwlimit", Form::Text, "--bwlimit"),
    option("max_latency", Form::Count { min: 1, max: 3_600_000 }, "--max-latency"),
    option("hook", Form::Path, "--hook"),
    option("hook_folder", Form::Path, "--hook-folder"),
    option("hook_timeout", Form::Count { min: 1, max: 86_400 }, "--hook-timeout"),
    option("hook_failure", Form::OneOf(&["abort", "warn"]), "--hook-failure"),
    THREADS,
];

const PRUNE: &[JobOption] = &joined::<10>(&[&[names("machines")], KEEP, &[THREADS]]);

const HOST_PRUNE: &[JobOption] = &joined::<12>(&[&[names("machines"), names("datasets")], KEEP, &[STATES, CONNECT]]);

const GC: &[JobOption] = &[option("repack_below", count(100), "--repack-below"), THREADS];

const SCRUB: &[JobOption] = &[
    option("percent", Form::Count { min: 1, max: 100 }, "--percent"),
    THREADS,
];

const VERIFY: &[JobOption] = &[names("snapshots"), flag("structure", "--structure"), THREADS];

const COPY: &[JobOption] = &[
    names("snapshots"),
    flag("all", "--all"),
    option("machine", Form::Text, "--machine"),
    option("tag", Form::Texts, "--tag"),
    option("to", Form::Path, "--to"),
    option("to_password_file", Form::Path, "--to-password-file"),
    option("to_password_command", Form::Text, "--to-password-command"),
    option("bwlimit", Form::Text, "--bwlimit"),
    THREADS,
];

const REPLICATE: &[JobOption] = &[
    place("source"),
    place("target"),
    flag("recursive", "--recursive"),
    option("snapshots", Form::Texts, "--snapshots"),
    flag("newest", "--newest"),
    option("bwlimit", Form::Text, "--bwlimit"),
    option("compress", Form::OneOf(&["auto", "on", "off"]), "--compress"),
    flag("raw", "--raw"),
    flag("no_raw", "--no-raw"),
    option("ssh_option", Form::Texts, "--ssh-option"),
];

const FRESH: &[JobOption] = &[
    names("machines"),
    option("exclude_machine", Form::Texts, "--exclude-machine"),
    option("within", Form::Span, "--within"),
];

/// A path as the only operand; without it the command has a default.
const SANOID_FILE: JobOption = JobOption {
    key: "file",
    form: Form::Path,
    words: Words::Positional,
};

const fn check(name: &'static str, verb: &'static [&'static str]) -> JobKind {
    JobKind {
        name,
        verb,
        needs_repository: false,
        needs_one_of: &[],
        claim: Claim::Nothing,
        exit_codes: ExitCodeScheme::Check,
        options: &[SANOID_FILE],
    }
}

const fn of_repository(name: &'static str, verb: &'static [&'static str], options: &'static [JobOption]) -> JobKind {
    JobKind {
        name,
        verb,
        needs_repository: true,
        needs_one_of: &[],
        claim: Claim::Nothing,
        exit_codes: ExitCodeScheme::Verb,
        options,
    }
}

pub(super) const KINDS: &[JobKind] = &[
    JobKind {
        needs_one_of: &["machines", "images", "all"],
        claim: Claim::Machines,
        ..of_repository("backup", &["backup"], BACKUP)
    },
    JobKind {
        name: "snapshot",
        verb: &["snapshot"],
        needs_repository: false,
        needs_one_of: &["machines", "datasets"],
        claim: Claim::Machines,
        exit_codes: ExitCodeScheme::Verb,
        options: &[
            names("machines"),
            names("datasets"),
            flag("recursive", "--recursive"),
            MEMORY,
            STATES,
            CONNECT,
            QUIESCE,
            THREADS,
        ],
    },
    JobKind {
        name: "cron",
        verb: &["cron"],
        needs_repository: false,
        needs_one_of: &[],
        claim: Claim::Kind,
        exit_codes: ExitCodeScheme::Verb,
        options: &[
            SANOID_FILE,
            flag("take_only", "--take-only"),
            flag("prune_only", "--prune-only"),
            MEMORY,
            STATES,
            CONNECT,
            QUIESCE,
            THREADS,
        ],
    },
    JobKind {
        name: "host-prune",
        verb: &["host", "prune"],
        needs_repository: false,
        needs_one_of: &["machines", "datasets"],
        claim: Claim::Machines,
        exit_codes: ExitCodeScheme::Verb,
        options: HOST_PRUNE,
    },
    of_repository("prune", &["prune"], PRUNE),
    of_repository("gc", &["gc"], GC),
    of_repository("scrub", &["scrub"], SCRUB),
    JobKind {
        needs_one_of: &["to"],
        claim: Claim::Kind,
        ..of_repository("copy", &["copy"], COPY)
    },
    JobKind {
        name: "replicate",
        verb: &["replicate"],
        needs_repository: false,
        needs_one_of: &["source"],
        claim: Claim::Machines,
        exit_codes: ExitCodeScheme::Verb,
        options: REPLICATE,
    },
    of_repository("verify", &["verify"], VERIFY),
    JobKind {
        name: "doctor",
        verb: &["doctor"],
        needs_repository: false,
        needs_one_of: &[],
        claim: Claim::Kind,
        exit_codes: ExitCodeScheme::Verb,
        options: &[
            names("machines"),
            CONNECT,
            flag("fix", "--fix"),
            option("scratch", Form::Path, "--scratch"),
        ],
    },
    JobKind {
        needs_one_of: &["within"],
        exit_codes: ExitCodeScheme::Freshness,
        ..of_repository("fresh", &["monitor", "machines"], FRESH)
    },
    check("monitor-snapshots", &["monitor", "snapshots"]),
    check("monitor-health", &["monitor", "health"]),
    check("monitor-capacity", &["monitor", "capacity"]),
];

impl JobKind {
    /// The kind with this name.
    pub(super) fn find(name: &str) -> Option<&'static Self> {
        KINDS.iter().find(|kind| kind.name == name)
    }

    pub(super) fn option(&self, key: &str) -> Option<&'static JobOption> {
        self.options.iter().find(|option| option.key == key)
    }
}

impl JobOption {
    /// Whether the setting is allowed in `[defaults]`: settings that say what a job works on are not.
    pub(super) fn is_for_defaults(&self) -> bool {
        let is_rule = KEEP.iter().any(|rule| rule.key == self.key);
        let is_subject = [
            "all",
            "within",
            "machine",
            "include",
            "exclude",
            "take_only",
            "prune_only",
            "to",
            "recursive",
        ]
        .contains(&self.key);
        self.words != Words::Positional && !is_rule && !is_subject
    }

    /// A command line that contains this option.
    pub(super) fn line(&self, kind: &JobKind) -> Vec<String> {
        let value = match self.form {
            Form::Flag => Value::Flag(true),
            Form::Count { min, .. } => Value::Count(min),
            Form::OneOf(words) => Value::Text(words[0].to_owned()),
            Form::Span => Value::Text("7d".to_owned()),
            _ if self.key.ends_with("limit") || self.key.ends_with("max") => Value::Text("1M".to_owned()),
            _ => Value::Text("x".to_owned()),
        };
        let (mut words, mut positional) = (Vec::new(), Vec::new());
        words.extend(kind.verb.iter().map(|word| (*word).to_owned()));
        self.put(&value, &mut words, &mut positional);
        words.extend(positional);
        words
    }

    /// Appends the arguments of a value to the options, or to the operands.
    pub(super) fn put(&self, value: &Value, options: &mut Vec<String>, positional: &mut Vec<String>) {
        let shown = match value {
            Value::Texts(texts) => texts.clone(),
            other => vec![other.shown()],
        };
        match self.words {
            Words::Positional => positional.extend(shown),
            Words::Option(option) => options.extend(shown.into_iter().flat_map(|value| [option.to_owned(), value])),
            Words::Joined(option) => options.extend(shown.into_iter().map(|value| format!("{option}={value}"))),
            Words::Flag(option) => {
                if *value == Value::Flag(true) {
                    options.push(option.to_owned());
                }
            }
        }
    }
}
