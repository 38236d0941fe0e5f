//! The cursor's position on the command line.

use clap::{Arg, Command};

/// The context of the cursor.
pub(super) struct Cursor<'c> {
    /// The verb; the program if none is given yet.
    pub(super) command: &'c Command,
    /// Its path: `image info`.
    pub(super) path: String,
    /// What can be entered at the cursor.
    pub(super) place: CompletionPlace<'c>,
    /// The part that is typed already.
    pub(super) typed: String,
    /// The text before it in the same word: `--tag=`.
    pub(super) prefix: String,
    /// The values of options and arguments before the cursor.
    pub(super) given: Vec<(&'c Arg, String)>,
}

/// What can be entered at the cursor.
pub(super) enum CompletionPlace<'c> {
    /// A verb.
    Verb,
    /// An option.
    Option,
    /// A value of an option, or an argument.
    Value(&'c Arg),
    /// Unknown.
    Nothing,
}

impl<'c> Cursor<'c> {
    /// The cursor after the last of `words`; the first word is the program.
    pub(super) fn at(root: &'c Command, words: &[String]) -> Self {
        let (typed, before) = match words.split_last() {
            Some((typed, before)) if !before.is_empty() => (typed.as_str(), &before[1..]),
            _ => ("", &[][..]),
        };
        let mut read = Read {
            command: root,
            path: Vec::new(),
            given: Vec::new(),
            waiting: None,
            position: 0,
            are_options_over: false,
        };
        for word in before {
            read.word(word);
        }
        let (place, prefix) = read.place(typed);
        Self {
            command: read.command,
            path: read.path.join(" "),
            place,
            typed: typed[prefix.len()..].to_owned(),
            prefix,
            given: read.given,
        }
    }
}

/// The words before the cursor, parsed.
struct Read<'c> {
    command: &'c Command,
    path: Vec<&'c str>,
    given: Vec<(&'c Arg, String)>,
    /// The option that is still missing its value.
    waiting: Option<&'c Arg>,
    position: usize,
    are_options_over: bool,
}

impl<'c> Read<'c> {
    fn word(&mut self, word: &str) {
        if let Some(arg) = self.waiting.take() {
            self.given.push((arg, word.to_owned()));
        } else if !self.are_options_over && word == "--" {
            self.are_options_over = true;
        } else if !self.are_options_over && word.len() > 1 && word.starts_with('-') {
            let (name, value) = word
                .split_once('=')
                .map_or((word, None), |(name, value)| (name, Some(value)));
            match (self.option(name), value) {
                (Some(arg), Some(value)) => self.given.push((arg, value.to_owned())),
                (Some(arg), None) if needs_value(arg) => self.waiting = Some(arg),
                _ => {}
            }
        } else if let Some(below) = self.command.find_subcommand(word) {
            self.command = below;
            self.path.push(below.get_name());
        } else if let Some(arg) = self.argument() {
            self.given.push((arg, word.to_owned()));
            self.position += 1;
        }
    }

    /// What can be entered after the words, given that `typed` is entered already; also returns the prefix of `typed`
    /// that is an option before its value.
    fn place(&self, typed: &str) -> (CompletionPlace<'c>, String) {
        if let Some(arg) = self.waiting {
            return (CompletionPlace::Value(arg), String::new());
        }
        if !self.are_options_over && typed.starts_with('-') {
            return match typed.split_once('=') {
                None => (CompletionPlace::Option, String::new()),
                Some((name, _)) => match self.option(name) {
                    Some(arg) => (CompletionPlace::Value(arg), format!("{name}=")),
                    None => (CompletionPlace::Nothing, String::new()),
                },
            };
        }
        let place = match self.argument() {
            _ if self.command.has_subcommands() => CompletionPlace::Verb,
            Some(arg) => CompletionPlace::Value(arg),
            None => CompletionPlace::Nothing,
        };
        (place, String::new())
    }

    /// The option with this name, which includes the dashes.
    fn option(&self, name: &str) -> Option<&'c Arg> {
        let command: &'c Command = self.command;
        command.get_arguments().find(|arg| match name.strip_prefix("--") {
            Some(long) => arg.get_long() == Some(long),
            None => name.len() == 2 && arg.get_short() == name.chars().nth(1),
        })
    }

    /// The positional argument at the cursor; the last one if it takes several values.
    fn argument(&self) -> Option<&'c Arg> {
        let command: &'c Command = self.command;
        let arguments: Vec<&'c Arg> = command.get_positionals().collect();
        let several = |arg: &&&Arg| arg.get_num_args().is_some_and(|count| count.max_values() > 1);
        let last = arguments.last().filter(several);
        arguments.get(self.position).or(last).copied()
    }
}

/// Whether the word after the option is its value.
fn needs_value(arg: &Arg) -> bool {
    arg.get_action().takes_values() && arg.get_num_args().is_none_or(|count| count.min_values() > 0)
}

#[cfg(test)]
mod tests {
    use super::{CompletionPlace, Cursor};
    use crate::commands::COMMAND_LINE;

    /// The verb, the kind of place, and the typed part.
    fn at(line: &str) -> (String, String, String) {
        let mut root = COMMAND_LINE.tree();
        root.build();
        let words: Vec<String> = line.split(' ').map(str::to_owned).collect();
        let cursor = Cursor::at(&root, &words);
        let place = match cursor.place {
            CompletionPlace::Verb => "verb".to_owned(),
            CompletionPlace::Option => "option".to_owned(),
            CompletionPlace::Value(arg) => arg.get_id().to_string(),
            CompletionPlace::Nothing => "nothing".to_owned(),
        };
        (cursor.path, place, cursor.prefix + "|" + &cursor.typed)
    }

    #[test]
    fn the_place_of_the_cursor_is_found() {
        for (line, path, place, typed) in [
            ("holdfast ", "", "verb", "|"),
            ("holdfast -r /x im", "", "verb", "|im"),
            ("holdfast image ", "image", "verb", "|"),
            ("holdfast image info --fo", "image info", "option", "|--fo"),
            ("holdfast backup we", "backup", "sources", "|we"),
            ("holdfast backup web1 web2 w", "backup", "sources", "|w"),
            ("holdfast backup --tag ", "backup", "tags", "|"),
            ("holdfast backup --tag=a", "backup", "tags", "--tag=|a"),
            ("holdfast backup -r ", "backup", "repository", "|"),
            ("holdfast backup --with-memory ", "backup", "sources", "|"),
            ("holdfast backup -- --ta", "backup", "sources", "|--ta"),
            ("holdfast restore web1 ", "restore", "target", "|"),
            ("holdfast restore web1 x ", "restore", "nothing", "|"),
            ("holdfast run ni", "run", "jobs", "|ni"),
        ] {
            let found = at(line);
            assert_eq!(found, (path.to_owned(), place.to_owned(), typed.to_owned()), "{line}");
        }
    }
}
