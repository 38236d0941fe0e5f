//! The whole command line: all verbs with their help.

use clap::builder::styling::{AnsiColor, Styles};
use clap::{Command, CommandFactory as _, Parser};

use super::{AnyVerb, GROUPS};
use crate::args::{CommandLine, Example, GlobalArgs, examples_help};
use crate::context::Context;
use crate::errors::Error;
use crate::exit::Exit;
use crate::process::environment;

/// Keeps virtual machines safe and moves them
///
/// Holdfast backs up disks of virtual machines into an encrypted repository that stores equal data once and checks
/// everything it reads, and brings them back.
#[derive(Debug, Parser)]
#[command(name = "holdfast", version, arg_required_else_help = true, max_term_width = 100)]
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
        wish: "Bring it back as it was yesterday at noon",
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
    /// Does what the verb says that was chosen.
    ///
    /// # Errors
    /// Those of the verb.
    pub fn run(&self, context: &Context) -> Result<Exit, Error> {
        self.verb.run(context)
    }
}

/// Bold headings, green words to type: the same as the program's own output.
const STYLES: Styles = Styles::styled()
    .header(AnsiColor::White.on_default().bold())
    .usage(AnsiColor::White.on_default().bold())
    .literal(AnsiColor::Green.on_default())
    .placeholder(AnsiColor::Cyan.on_default());

/// The command line with the sections that clap does not know of: examples, exit codes, environment.
fn command_tree() -> Command {
    let after = format!(
        "Exit codes:\n{}\n\nEnvironment:\n{}\n\nExamples:\n{}",
        Exit::help(),
        environment::help(),
        examples_help(EXAMPLES)
    );
    let root = Arguments::command().styles(STYLES).after_long_help(after);
    with_examples(root, "")
}

/// Adds the examples of each verb below `command`, whose path from the root is `path`.
fn with_examples(command: Command, path: &str) -> Command {
    let names: Vec<String> = command
        .get_subcommands()
        .map(|verb| verb.get_name().to_owned())
        .collect();
    names.into_iter().fold(command, |command, name| {
        let path = joined(path, &name);
        command.mut_subcommand(name, |verb| {
            let examples = COMMAND_LINE.examples_of(&path);
            let verb = if examples.is_empty() {
                verb
            } else {
                verb.after_help(format!("Examples:\n{}", examples_help(examples)))
            };
            with_examples(verb, &path)
        })
    })
}

/// Paths of all verbs that do something themselves: `list`, `image info`.
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

    /// Help that only the author understands is no help.
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
