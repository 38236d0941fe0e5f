//! From the command line to the exit code.

use std::ffi::{OsStr, OsString};
use std::process::ExitCode;

use clap::{ColorChoice, FromArgMatches as _};

use crate::args::{Arguments, ColorWhen, command_tree};
use crate::context::Context;
use crate::environment::Environment;
use crate::errors::{Error, chain};
use crate::exit::Exit;
use crate::interrupt::end_by;
use crate::output::{Format, error_document};

/// Runs the program as this process.
pub fn main() -> ExitCode {
    run(std::env::args_os().collect(), Environment::of_process()).into()
}

/// Runs the program with the words of a command line.
fn run(words: Vec<OsString>, environment: Environment) -> Exit {
    let color = color_of(&words);
    let parsed = command_tree()
        .color(clap_color(color, &environment))
        .try_get_matches_from(words)
        .and_then(|mut matches| Ok((verb_path(&matches), Arguments::from_arg_matches_mut(&mut matches)?)));
    match parsed {
        Ok((path, arguments)) => {
            let context = Context::of_process(arguments.global, environment);
            arguments
                .verb
                .run(&context)
                .unwrap_or_else(|error| fail(&path, &error, &context))
        }
        Err(error) => {
            // Help and version that were asked for are an answer; everything else is wrong usage.
            // Nobody is left to tell when the stream is gone.
            error.print().ok();
            if error.use_stderr() { Exit::Usage } else { Exit::Ok }
        }
    }
}

/// Tells why a verb failed; a job that a signal has stopped ends the program by that signal.
fn fail(path: &str, error: &Error, context: &Context) -> Exit {
    let advice = error.advice();
    let console = context.console();
    console.clear_progress();
    console.error(&chain(error), advice.hint.as_deref());
    let signal = context.signal().filter(|_| matches!(error, Error::Interrupted(_)));
    if context.output().format() == Format::Json {
        let exit_code = signal.map_or(advice.exit.code().into(), |signal| 128 + signal);
        let document = error_document(Some(path), error, exit_code, &console.warnings());
        if let Err(error) = document.and_then(|document| context.output().data(document.as_bytes())) {
            console.error(&chain(&error), None);
        }
    }
    if let Some(signal) = signal
        && let Err(error) = end_by(signal)
    {
        console.error(&chain(&error), None);
    }
    advice.exit
}

/// The verb as it was typed: `list`, `image info`.
fn verb_path(matches: &clap::ArgMatches) -> String {
    let mut names = Vec::new();
    let mut matches = matches;
    while let Some((name, below)) = matches.subcommand() {
        names.push(name);
        matches = below;
    }
    names.join(" ")
}

/// What `--color` says, read ahead of the rest: help and usage errors are printed before there are any options.
fn color_of(words: &[OsString]) -> ColorWhen {
    let mut color = ColorWhen::Auto;
    let mut words = words.iter().map(OsString::as_os_str);
    while let Some(word) = words.next() {
        let value = match word.to_str() {
            Some("--") => break,
            Some("--color") => words.next().and_then(OsStr::to_str),
            Some(word) => word.strip_prefix("--color="),
            None => None,
        };
        match value {
            Some("always") => color = ColorWhen::Always,
            Some("never") => color = ColorWhen::Never,
            _ => {}
        }
    }
    color
}

/// The same for clap, which finds out by itself whether its stream is a terminal.
fn clap_color(when: ColorWhen, environment: &Environment) -> ColorChoice {
    match when {
        ColorWhen::Always => ColorChoice::Always,
        ColorWhen::Auto if environment.get("NO_COLOR").is_none() => ColorChoice::Auto,
        ColorWhen::Auto | ColorWhen::Never => ColorChoice::Never,
    }
}

#[cfg(test)]
mod tests {
    use super::color_of;
    use crate::args::ColorWhen;

    #[test]
    fn colour_is_known_before_the_line_is_parsed() {
        let color = |line: &str| color_of(&line.split(' ').map(Into::into).collect::<Vec<_>>());
        assert_eq!(color("holdfast --color never --help"), ColorWhen::Never);
        assert_eq!(color("holdfast version --color=always"), ColorWhen::Always);
        assert_eq!(color("holdfast --color"), ColorWhen::Auto);
        assert_eq!(color("holdfast -- --color never"), ColorWhen::Auto);
    }
}
