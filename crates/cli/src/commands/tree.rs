//! The whole command line: all verbs with their help.

use clap::builder::styling::{AnsiColor, Styles};
use clap::{Arg, Command, CommandFactory as _, Parser};

use super::overview::grouped_verbs;
use super::{AnyVerb, GROUPS};
use crate::args::{CommandLine, Example, GlobalArgs, VerbEntry, examples_help};
use crate::context::Context;
use crate::errors::Error;
use crate::exit::Exit;
use crate::process::environment;

/// Backup, host snapshots and restore of virtual machines
///
/// Holdfast backs up virtual machines into an encrypted, deduplicating repository, takes and replicates snapshots of their storage (ZFS,
/// btrfs, LVM), and restores, clones, converts and exports them.
#[derive(Debug, Parser)]
#[command(name = "holdfast", version, disable_help_subcommand = true, max_term_width = 100)]
pub struct Arguments {
    /// What all verbs share.
    #[command(flatten)]
    pub global: GlobalArgs,
    /// What to do.
    #[command(subcommand)]
    verb: AnyVerb,
}

/// Examples of the program as a whole.
const EXAMPLES: &[Example] = &[
    Example {
        wish: "Make a repository",
        line: "holdfast init --repository /backup/vms",
    },
    Example {
        wish: "Back up a machine",
        line: "holdfast backup --repository /backup/vms /var/lib/libvirt/images/web1.qcow2",
    },
    Example {
        wish: "Restore it as it was at a given time",
        line: "holdfast restore --repository /backup/vms web1@2026-11-20T12:00 web1.raw",
    },
    Example {
        wish: "See the options of a verb",
        line: "holdfast backup --help",
    },
];

/// The whole command line.
pub const COMMAND_LINE: &CommandLine = &CommandLine {
    tree: command_tree,
    groups: GROUPS,
    examples: EXAMPLES,
};

impl Arguments {
    /// Runs the selected verb.
    ///
    /// # Errors
    /// Those of the verb.
    pub fn run(&self, context: &Context) -> Result<Exit, Error> {
        self.verb.run(context)
    }
}

/// Bold headings and green literals, as in the program's own output.
const STYLES: Styles = Styles::styled()
    .header(AnsiColor::White.on_default().bold())
    .usage(AnsiColor::White.on_default().bold())
    .literal(AnsiColor::Green.on_default())
    .placeholder(AnsiColor::Cyan.on_default());

/// The command line with the parts that clap does not know: groups of verbs, examples, exit codes,
/// environment.
fn command_tree() -> Command {
    let after = format!(
        "Exit codes:\n{}\n\nEnvironment:\n{}\n\nExamples:\n{}",
        Exit::help(),
        environment::help(),
        examples_help(EXAMPLES)
    );
    let root = Arguments::command().styles(STYLES).after_long_help(after);
    let shared: Vec<Arg> = root.get_arguments().cloned().collect();
    let root = GROUPS.iter().flat_map(|group| group.verbs).fold(root, |root, entry| {
        root.mut_subcommand(entry.name, |verb| completed(verb, entry, &shared))
    });
    let template = format!(
        "{{about-with-newline}}\n{{usage-heading}} {{usage}}\n\n{}\n\n{{all-args}}{{after-help}}",
        grouped_verbs(&root, &STYLES)
    );
    // The template lists verbs by group, so clap must not list them again.
    root.mut_subcommands(|verb| verb.hide(true))
        .override_usage("holdfast [OPTIONS] <COMMAND>")
        .help_template(template)
        .after_help("'holdfast help COMMAND' shows the options and examples of a command.")
}

/// Completes a verb and those below it: adds examples, and hides options that have no effect. These are still accepted,
/// since scripts pass them to every command.
fn completed(verb: Command, entry: &VerbEntry, shared: &[Arg]) -> Command {
    let unused = |arg: &&Arg| {
        entry
            .unused
            .iter()
            .any(|options| options.ids().contains(&arg.get_id().as_str()))
    };
    let verb = verb
        .after_help(format!("Examples:\n{}", examples_help(entry.examples)))
        .args(shared.iter().filter(unused).map(|arg| arg.clone().hide(true)));
    entry.below.iter().fold(verb, |verb, below| {
        verb.mut_subcommand(below.name, |verb| completed(verb, below, shared))
    })
}

/// Paths of all verbs that can be run: `list`, `image info`.
pub fn verb_paths() -> Vec<String> {
    fn collect(command: &Command, path: &str, paths: &mut Vec<String>) {
        for verb in command.get_subcommands() {
            let path = joined(path, verb.get_name());
            if verb.has_subcommands() {
                collect(verb, &path, paths);
            } else {
                paths.push(path);
            }
        }
    }
    let mut paths = Vec::new();
    collect(&Arguments::command(), "", &mut paths);
    paths
}

fn joined(path: &str, name: &str) -> String {
    if path.is_empty() {
        name.to_owned()
    } else {
        format!("{path} {name}")
    }
}

#[cfg(test)]
mod tests {
    use super::{COMMAND_LINE, EXAMPLES, command_tree, verb_paths};
    use crate::args::Example;

    #[test]
    fn the_command_line_is_consistent() {
        command_tree().debug_assert();
    }

    #[test]
    fn every_verb_has_an_example_and_every_example_parses() {
        let paths = verb_paths();
        assert!(paths.contains(&"version".to_owned()), "{paths:?}");
        for path in &paths {
            let examples = COMMAND_LINE.examples_of(path);
            assert!(!examples.is_empty(), "no example for {path}");
            for example in examples {
                parses(example);
                let words = example.arguments().unwrap_or_default().join(" ");
                assert!(words.contains(path.as_str()), "{} does not show {path}", example.line);
            }
        }
        EXAMPLES.iter().for_each(parses);
    }

    /// Commands that change something: each needs `--dry-run`.
    const CHANGING: &[&str] = &[
        "backup",
        "restore",
        "files restore",
        "resume",
        "copy",
        "prune",
        "forget",
        "protect",
        "unprotect",
        "init",
        "key add",
        "key rotate",
        "key remove",
        "gc",
        "repair",
        "snapshot",
        "host clone",
        "host prune",
        "host remove",
        "host hold",
        "host release",
        "rollback",
        "clone",
        "cron",
        "replicate",
        "image check",
        "image convert",
        "image create",
        "image resize",
        "image identity",
        "container create",
        "container switch",
        "container clone",
        "container delete",
        "container merge",
        "container resume",
        "import",
        "export",
        "template push",
        "template pull",
        "template tag",
        "template remove",
        "live-copy",
        "migrate",
    ];

    /// Commands that change something without `--dry-run`, for a reason that `docs/command-line.md` gives.
    const WITHOUT_DRY_RUN: &[&str] = &[
        "serve nbd",
        "serve iscsi",
        "serve vhost-user",
        "serve all",
        "serve add",
        "serve remove",
        "serve stop",
        "live-server",
        "files-reader",
        "files-machine",
        "watchdog",
        "mount",
        "mount-server",
        "image mount",
        "image mount-server",
        "image mount-worker",
        "container mount",
        "container unmount",
        "container snapshot",
        "container resize",
        "container trim",
        "container mount-server",
        "container mount-worker",
        "container freezer",
        "container snapshot-server",
        "unmount",
        "receive",
        "receive-disk",
        "receive-machine",
        "receive-container",
        "receive-migration",
        "freeze-commands",
        "peer",
        "daemon",
        "run",
        "notify",
        "monitor metrics",
        "doctor",
        "man",
    ];

    /// Commands that only read, or write to standard output.
    const READING: &[&str] = &[
        "machines",
        "serve list",
        "list",
        "show",
        "files ls",
        "files find",
        "files cat",
        "diff",
        "verify",
        "key list",
        "key paper",
        "stats",
        "scrub",
        "host datasets",
        "host list",
        "image info",
        "image map",
        "image compare",
        "container snapshots",
        "container info",
        "container check",
        "archive info",
        "archive check",
        "archive read",
        "compress",
        "template list",
        "template show",
        "jobs",
        "runs",
        "monitor snapshots",
        "monitor health",
        "monitor capacity",
        "monitor machines",
        "config check",
        "config show",
        "version",
        "completions",
        "complete",
        "help",
    ];

    /// Each command must be in one of the lists, so that a new one cannot be forgotten.
    #[test]
    fn what_changes_something_has_a_dry_run() {
        let tree = command_tree();
        for path in verb_paths() {
            let command = path.split(' ').fold(&tree, |command, word| {
                command.find_subcommand(word).expect("the path of a command")
            });
            let dry_run = command
                .get_arguments()
                .find(|argument| argument.get_long() == Some("dry-run"));
            let lists = [CHANGING, WITHOUT_DRY_RUN, READING].map(|list| list.contains(&path.as_str()));
            assert_eq!(
                lists.iter().filter(|is_in| **is_in).count(),
                1,
                "{path} is in one list of commands"
            );
            assert_eq!(dry_run.is_some(), lists[0], "--dry-run of {path}");
            let short = dry_run.and_then(clap::Arg::get_short);
            assert_eq!(short, lists[0].then_some('n'), "the short form of {path}");
        }
        let paths = verb_paths();
        for path in [CHANGING, WITHOUT_DRY_RUN, READING].concat() {
            assert!(paths.iter().any(|known| known == path), "there is no command {path}");
        }
    }

    #[test]
    fn the_manual_says_why_there_is_no_dry_run() {
        let text = include_str!("../../../../docs/command-line.md");
        for path in WITHOUT_DRY_RUN {
            assert!(text.contains(&format!("`{path}`")), "no reason for {path}");
        }
    }

    fn parses(example: &Example) {
        let arguments = example
            .arguments()
            .unwrap_or_else(|| panic!("{} starts no holdfast", example.line));
        let words = std::iter::once("holdfast".to_owned()).chain(arguments);
        if let Err(error) = command_tree().try_get_matches_from(words)
            && error.use_stderr()
        {
            panic!("{}: {error}", example.line);
        }
    }

    /// Help must describe each verb and option.
    #[test]
    fn every_verb_and_option_says_what_it_is() {
        fn check(command: &clap::Command) {
            assert!(
                command.get_about().is_some(),
                "{} has no description",
                command.get_name()
            );
            for argument in command.get_arguments() {
                assert!(
                    argument.get_help().is_some(),
                    "{} of {} has no help",
                    argument.get_id(),
                    command.get_name()
                );
            }
            command.get_subcommands().for_each(check);
        }
        check(&command_tree());
    }
}
