//! Errors in a command line, in the same form as all other errors.

use std::ffi::OsString;

use clap::Command;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use holdfast_policy::nearest;

use super::CommandLine;
use super::peer_words::instead_of;
use crate::errors::Error;

impl CommandLine {
    /// The error for a word that is not a verb, at a position where a verb below `path` is required.
    pub fn unknown_verb(&self, path: &str, word: &str) -> Error {
        let full = joined(path, word);
        let near = nearest(word, self.verbs_for_people(path).map(|verb| verb.name));
        let hint = match (path.is_empty().then(|| instead_of(word)).flatten(), near) {
            (Some(instead), _) => instead.to_owned(),
            (None, Some(near)) => format!("did you mean '{}'?", joined("holdfast", &joined(path, near))),
            (None, None) if path.is_empty() => "'holdfast help' lists all commands".to_owned(),
            (None, None) => format!("'{}' lists its commands", joined("holdfast help", path)),
        };
        Error::usage(format!("unknown command '{full}'"), hint)
    }

    /// The error of a command line that clap rejects.
    pub fn error(&self, error: &clap::Error, words: &[OsString]) -> Error {
        let path = self.typed_path(words);
        let help = format!("'{}'", joined("holdfast help", &path));
        match error.kind() {
            ErrorKind::InvalidSubcommand => {
                if let Some(ContextValue::String(word)) = error.get(ContextKind::InvalidSubcommand) {
                    return self.unknown_verb(&path, word);
                }
            }
            ErrorKind::MissingSubcommand | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
                return Error::usage("no command is given", format!("{help} lists all commands"));
            }
            _ => {}
        }
        let suggested = match error.get(ContextKind::SuggestedArg) {
            Some(ContextValue::String(option)) => Some(option.as_str()),
            _ => None,
        };
        let hint = match (suggested, error.kind(), error.get(ContextKind::Usage)) {
            (Some(option), _, _) => format!("did you mean {option}? {help} shows all options"),
            (None, ErrorKind::MissingRequiredArgument, Some(ContextValue::StyledStr(usage))) => {
                let usage = usage.to_string();
                let line = usage.trim().trim_start_matches("Usage: ").to_owned();
                format!("usage: {line}; {help} shows all options")
            }
            _ => format!("{help} shows all options"),
        };
        Error::usage(first_paragraph(&error.render().to_string()), hint)
    }

    /// The path of the verb that a command line names, even if the rest of the line is wrong.
    pub fn typed_path(&self, words: &[OsString]) -> String {
        let tree = self.tree();
        let mut command: &Command = &tree;
        let mut path = String::new();
        let mut words = words.iter().skip(1).map(|word| word.to_string_lossy());
        while let Some(word) = words.next() {
            if word == "--" {
                break;
            }
            if takes_next(&tree, &word) {
                words.next();
            } else if let Some(below) = command.find_subcommand(word.as_ref()) {
                path = joined(&path, below.get_name());
                command = below;
            }
        }
        path
    }
}

/// Whether `word` is an option of `root` that takes the following word as its value.
fn takes_next(root: &Command, word: &str) -> bool {
    let is_it = |arg: &clap::Arg| match word.strip_prefix("--") {
        Some(long) => arg.get_long() == Some(long),
        None => word.len() == 2 && word.starts_with('-') && arg.get_short() == word.chars().nth(1),
    };
    root.get_arguments()
        .any(|arg| arg.get_action().takes_values() && is_it(arg))
}

/// The lines before the first empty line, joined to one.
fn first_paragraph(text: &str) -> String {
    let lines = text.lines().map(str::trim).take_while(|line| !line.is_empty());
    let joined = lines.collect::<Vec<_>>().join(" ");
    joined.trim_start_matches("error: ").to_owned()
}

fn joined(path: &str, name: &str) -> String {
    match (path.is_empty(), name.is_empty()) {
        (true, _) => name.to_owned(),
        (_, true) => path.to_owned(),
        _ => format!("{path} {name}"),
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;

    use crate::commands::COMMAND_LINE;

    fn words(line: &str) -> Vec<OsString> {
        line.split(' ').map(OsString::from).collect()
    }

    /// The message and the hint for a line of clap's error.
    fn said(line: &str) -> (String, String) {
        let error = COMMAND_LINE.tree().try_get_matches_from(words(line)).unwrap_err();
        let error = COMMAND_LINE.error(&error, &words(line));
        (error.to_string(), error.advice().hint.unwrap_or_default())
    }

    #[test]
    fn an_unknown_verb_leads_to_the_right_one() {
        for (line, message, hint) in [
            (
                "holdfast snapshots",
                "unknown command 'snapshots'",
                "use 'holdfast list'",
            ),
            (
                "holdfast bakup web1",
                "unknown command 'bakup'",
                "did you mean 'holdfast backup'?",
            ),
            (
                "holdfast image chek",
                "unknown command 'image chek'",
                "did you mean 'holdfast image check'?",
            ),
            (
                "holdfast -r backup nonsense",
                "unknown command 'nonsense'",
                "'holdfast help' lists all commands",
            ),
            (
                "holdfast key dance",
                "unknown command 'key dance'",
                "'holdfast help key' lists its commands",
            ),
            (
                "holdfast live-serve",
                "unknown command 'live-serve'",
                "'holdfast help' lists all commands",
            ),
            (
                "holdfast watchdo",
                "unknown command 'watchdo'",
                "'holdfast help' lists all commands",
            ),
            (
                "holdfast --json",
                "no command is given",
                "'holdfast help' lists all commands",
            ),
        ] {
            assert_eq!(said(line), (message.to_owned(), hint.to_owned()), "{line}");
        }
    }

    #[test]
    fn options_are_refused_in_one_sentence_with_a_way_on() {
        let (message, hint) = said("holdfast backup web1 --bogus");
        assert_eq!(message, "unexpected argument '--bogus' found");
        assert_eq!(hint, "'holdfast help backup' shows all options");
        let (_, hint) = said("holdfast backup web1 --tagg x");
        assert!(hint.starts_with("did you mean --tag?"), "{hint}");
        let (message, hint) = said("holdfast show");
        assert!(message.ends_with("not provided: <SNAPSHOT[:DISK]>"), "{message}");
        assert!(hint.starts_with("usage: holdfast show "), "{hint}");
        let (message, _) = said("holdfast backup");
        assert!(message.ends_with("not provided: <SOURCE|--all>"), "{message}");
        let (message, _) = said("holdfast serve nbd web1");
        assert!(
            message.ends_with("not provided: <--socket <PATH>|--listen <ADDRESS>>"),
            "{message}"
        );
        let (message, _) = said("holdfast list --color mauve");
        assert!(message.contains("[possible values: auto, always, never]"), "{message}");
    }

    #[test]
    fn the_verb_is_found_in_a_wrong_line() {
        for (line, path) in [
            ("holdfast -r list image chek", "image"),
            ("holdfast image --repository x info --bogus", "image info"),
            ("holdfast -- list", ""),
        ] {
            assert_eq!(COMMAND_LINE.typed_path(&words(line)), path, "{line}");
        }
    }
}
