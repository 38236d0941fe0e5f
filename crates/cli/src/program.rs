//! From the command line to the exit code.

use std::ffi::{OsStr, OsString};
use std::io::Write as _;
use std::process::ExitCode;

use clap::builder::StyledStr;
use clap::error::ErrorKind;
use clap::{ColorChoice, Command, FromArgMatches as _};
use holdfast_appliance::{APPLIANCE_INIT, serve_as_init};
use holdfast_block::error_messages;
use holdfast_host::map_large_buffers;
use holdfast_policy::sanoid::Level;
use rustix::fs::Mode;
use rustix::process::{DumpableBehavior, Resource, Rlimit, getrlimit, set_dumpable_behavior, setrlimit, umask};

use crate::args::{ColorWhen, GlobalArgs, OutputArgs};
use crate::commands::{Arguments, COMMAND_LINE, short_screen, unknown_line};
use crate::context::Context;
use crate::context::standard_streams::open_output;
use crate::errors::Error;
use crate::exit::Exit;
use crate::output::{Format, Paint, error_document};
use crate::process::environment::Environment;
use crate::process::interrupt::{ProgressRequests, end_by, hear_questions};
use crate::process::panic::{PANIC_GRACE, end_after_panic};
use crate::process::terminal::StreamKind;

/// Runs the program as this process.
pub fn main() -> ExitCode {
    if is_appliance() {
        serve_as_init();
        return ExitCode::SUCCESS;
    }
    map_large_buffers();
    keep_to_itself();
    end_after_panic(PANIC_GRACE, holdfast_engine::has_watchdog);
    // Before anything else: until then these signals would end the program. If the handlers cannot be
    // installed, they do.
    let requests = hear_questions().unwrap_or_default();
    let words: Vec<OsString> = std::env::args_os().collect();
    run(&words, Environment::of_process(), requests).into()
}

/// Whether this is the first process of an appliance. Its kernel also passes the options that it does not know.
fn is_appliance() -> bool {
    std::process::id() == 1 && std::env::args_os().skip(1).any(|word| word == APPLIANCE_INIT)
}

/// Protects the secrets of the process (passwords and keys): it writes no core dump and cannot be traced by programs of
/// the same user; and the files that it creates are not writable by others, whatever the caller's umask is.
fn keep_to_itself() {
    // Neither can fail with these arguments on a supported kernel, and a failure should not prevent a backup.
    set_dumpable_behavior(DumpableBehavior::NotDumpable).ok();
    let limit = Rlimit {
        current: Some(0),
        ..getrlimit(Resource::Core)
    };
    setrlimit(Resource::Core, limit).ok();
    let mask = umask(Mode::empty());
    umask(mask | Mode::WGRP | Mode::WOTH);
}

/// Runs the program with the words of a command line.
fn run(words: &[OsString], environment: Environment, requests: ProgressRequests) -> Exit {
    let color = color_of(words);
    let tree = COMMAND_LINE.tree().color(clap_color(color, &environment));
    if words.len() <= 1 {
        show_short_screen(&tree, color, &environment);
        return Exit::Usage;
    }
    let parsed = tree
        .try_get_matches_from(words)
        .and_then(|mut matches| Ok((verb_path(&matches), Arguments::from_arg_matches_mut(&mut matches)?)));
    match parsed {
        Ok((path, arguments)) => {
            let context = Context::of_process(arguments.global.clone(), environment, requests, COMMAND_LINE);
            let ended = open_output()
                .and_then(|()| context.begin_log())
                .and_then(|()| arguments.run(&context));
            let exit = ended.unwrap_or_else(|error| fail(Some(&path), &error, &context));
            if let Exit::Signal(number) = exit
                && let Err(error) = end_by(number.into())
            {
                context.console().error(&error_messages(&error), None);
            }
            exit
        }
        Err(error) if !error.use_stderr() => {
            // Requested help and version are regular output. If the stream is closed, the error cannot be
            // reported.
            error.print().ok();
            Exit::Ok
        }
        Err(error) => {
            let wrong = COMMAND_LINE.error(&error, words);
            if is_check(words) {
                return check_unknown(&error, &wrong);
            }
            let global = GlobalArgs {
                output: OutputArgs {
                    json: is_typed(words, "--json"),
                    color,
                    ..OutputArgs::default()
                },
                ..GlobalArgs::default()
            };
            let context = Context::of_process(global, environment, requests, COMMAND_LINE);
            if error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand
                && context.output().format() == Format::Human
            {
                error.print().ok();
                return Exit::Usage;
            }
            let path = COMMAND_LINE.typed_path(words);
            fail(Some(path.as_str()).filter(|path| !path.is_empty()), &wrong, &context)
        }
    }
}

/// Prints the short screen if no verb is given.
fn show_short_screen(tree: &Command, color: ColorWhen, environment: &Environment) {
    let stream = std::io::stderr();
    let screen = StyledStr::from(short_screen(tree));
    let text = match Paint::choose(color, environment, StreamKind::of_stderr(&stream)) {
        Paint::Color => screen.ansi().to_string(),
        Paint::Plain => screen.to_string(),
    };
    // If the stream is closed, the error cannot be reported.
    stream.lock().write_all(text.as_bytes()).ok();
}

/// Whether a switch is present on an invalid command line.
fn is_typed(words: &[OsString], switch: &str) -> bool {
    words.iter().take_while(|word| *word != "--").any(|word| word == switch)
}

/// Whether an invalid command line is that of a check, whose caller reads only standard output.
fn is_check(words: &[OsString]) -> bool {
    let path = COMMAND_LINE.typed_path(words);
    path.starts_with("monitor") && path != "monitor metrics"
}

/// Reports to the caller of a check that its command line is invalid.
fn check_unknown(error: &clap::Error, wrong: &Error) -> Exit {
    let reason = match error.kind() {
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            "name a check: snapshots, health, capacity or machines".to_owned()
        }
        _ => wrong.to_string(),
    };
    // If the stream is closed, the error cannot be reported.
    std::io::stdout().write_all(unknown_line(&reason).as_bytes()).ok();
    Exit::Check(Level::Unknown)
}

/// Reports why a verb failed. If a signal stopped the job, the program ends itself with that signal.
fn fail(path: Option<&str>, error: &Error, context: &Context) -> Exit {
    let advice = error.advice();
    let console = context.console();
    console.clear_progress();
    console.error(&error_messages(error), advice.hint.as_deref());
    let signal = context.signal().filter(|_| matches!(error, Error::Interrupted(_)));
    if context.output().format() == Format::Json {
        let exit_code = signal.map_or(advice.exit.code().into(), |signal| 128 + signal);
        let document = error_document(path, error, exit_code, &console.warnings());
        if let Err(error) = document.and_then(|document| context.output().data(document.as_bytes())) {
            console.error(&error_messages(&error), None);
        }
    }
    if let Some(signal) = signal
        && let Err(error) = end_by(signal)
    {
        console.error(&error_messages(&error), None);
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

/// The value of `--color`, parsed before the rest: help and usage errors are printed before options are
/// available.
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

/// The same for clap, which checks by itself whether its stream is a terminal.
fn clap_color(when: ColorWhen, environment: &Environment) -> ColorChoice {
    match when {
        ColorWhen::Always => ColorChoice::Always,
        ColorWhen::Auto if environment.get("NO_COLOR").is_none() => ColorChoice::Auto,
        ColorWhen::Auto | ColorWhen::Never => ColorChoice::Never,
    }
}

#[cfg(test)]
mod tests {
    use super::{color_of, is_check};
    use crate::args::ColorWhen;

    #[test]
    fn a_check_is_known_by_its_words_whatever_is_wrong_with_them() {
        let is_check = |line: &str| is_check(&line.split(' ').map(Into::into).collect::<Vec<_>>());
        for line in [
            "holdfast monitor",
            "holdfast monitor helth",
            "holdfast monitor health --tiemout 3",
            "holdfast --json monitor health a b",
            "holdfast -r x monitor snapshots --timeout never",
        ] {
            assert!(is_check(line), "{line}");
        }
        for line in [
            "holdfast",
            "holdfast monitor metrics --outptu x",
            "holdfast list monitor health",
        ] {
            assert!(!is_check(line), "{line}");
        }
    }

    #[test]
    fn colour_is_known_before_the_line_is_parsed() {
        let color = |line: &str| color_of(&line.split(' ').map(Into::into).collect::<Vec<_>>());
        assert_eq!(color("holdfast --color never --help"), ColorWhen::Never);
        assert_eq!(color("holdfast version --color=always"), ColorWhen::Always);
        assert_eq!(color("holdfast --color"), ColorWhen::Auto);
        assert_eq!(color("holdfast -- --color never"), ColorWhen::Auto);
    }
}
