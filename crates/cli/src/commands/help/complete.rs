//! `holdfast complete`: returns completions for the cursor position, for the scripts of `holdfast
//! completions`.
//!
//! The first line of the output says whether the shell adds file names: `none`, `files` or `folders`. Each following
//! line is a word, a tab and a description. Anything that cannot be determined (no permission, password prompt needed)
//! is omitted, since a shell shows no errors during completion.

mod cursor;
mod line;
mod values;

use std::ffi::OsString;

use clap::{Arg, Command};

use self::cursor::{CompletionPlace, Cursor};
use self::values::{CompletionValue, Files, values_of};
use crate::args::{CommandLine, Example, SharedOptions};
use crate::commands::verb::Verb;
use crate::context::Context;
use crate::errors::Error;
use crate::exit::Exit;
use crate::output::printable;

/// Arguments of `complete`.
#[derive(Debug, clap::Args)]
pub(crate) struct CompleteArgs {
    /// The line up to the cursor, as a shell has it that splits words at colons
    #[arg(long, value_name = "LINE", allow_hyphen_values = true, conflicts_with = "words")]
    line: Option<OsString>,
    /// The words up to the cursor, the program first
    #[arg(value_name = "WORD", trailing_var_arg = true, allow_hyphen_values = true)]
    words: Vec<OsString>,
}

impl Verb for CompleteArgs {
    const EXAMPLES: &'static [Example] = &[Example {
        wish: "The scripts of holdfast completions start it",
        line: "holdfast complete -- holdfast backup --ta",
    }];
    const UNUSED: &'static [SharedOptions] = &[SharedOptions::Repository, SharedOptions::Json, SharedOptions::Progress];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        let words = match &self.line {
            Some(line) => line::words(&line.to_string_lossy()),
            None => self
                .words
                .iter()
                .map(|word| word.to_string_lossy().into_owned())
                .collect(),
        };
        let mut root = context.command_line().tree();
        root.build();
        let cursor = Cursor::at(&root, &words);
        let (files, found) = candidates(&cursor, context);
        let mut text = format!("{}\n", files.word());
        for value in found.iter().filter(|value| value.word.starts_with(&cursor.typed)) {
            // Words with control characters cannot be typed and might change the terminal's state.
            if printable(&value.word) == value.word {
                let about = printable(&value.about);
                text.extend([&cursor.prefix, &value.word, "\t", &about, "\n"]);
            }
        }
        context.output().data(text.as_bytes())?;
        Ok(Exit::Ok)
    }
}

/// The completions for the cursor position.
fn candidates(cursor: &Cursor<'_>, context: &Context) -> (Files, Vec<CompletionValue>) {
    match &cursor.place {
        CompletionPlace::Verb => (Files::None, verbs(cursor.command, &cursor.path, context.command_line())),
        CompletionPlace::Option => (Files::None, options(cursor.command)),
        CompletionPlace::Value(_) if cursor.path == "help" => (Files::None, topics(cursor, context.command_line())),
        CompletionPlace::Value(arg) => values_of(arg, cursor, context),
        CompletionPlace::Nothing => (Files::None, Vec::new()),
    }
}

/// The verbs below `command` that users start.
fn verbs(command: &Command, path: &str, line: &CommandLine) -> Vec<CompletionValue> {
    let below = line.verbs_for_people(path);
    let found = below.filter_map(|verb| command.find_subcommand(verb.name));
    found
        .map(|verb| CompletionValue::new(verb.get_name(), &about(verb.get_about())))
        .collect()
}

/// The commands that have a help page.
fn topics(cursor: &Cursor<'_>, line: &CommandLine) -> Vec<CompletionValue> {
    let given: Vec<&str> = cursor.given.iter().map(|(_, word)| word.as_str()).collect();
    let path = given.join(" ");
    let names = line.verbs_for_people(&path).map(|verb| verb.name);
    names.map(|name| CompletionValue::new(name, "")).collect()
}

/// The options of `command` that its help shows.
fn options(command: &Command) -> Vec<CompletionValue> {
    let shown = command.get_arguments().filter(|arg| !arg.is_hide_set());
    let named = shown.filter_map(|arg: &Arg| Some((arg.get_long()?, arg)));
    named
        .map(|(long, arg)| CompletionValue::new(&format!("--{long}"), &about(arg.get_help())))
        .collect()
}

/// The first sentence of a help text.
fn about(help: Option<&clap::builder::StyledStr>) -> String {
    let text = help.map(ToString::to_string).unwrap_or_default();
    text.lines().next().unwrap_or_default().to_owned()
}
