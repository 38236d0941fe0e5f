//! `holdfast man DIR`: writes the manual, one page per verb.

use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use clap::Command;
use clap_mangen::Man;
use clap_mangen::roff::{Roff, bold, roman};
use serde::Serialize;

use crate::args::{Audience, CommandLine, Example, SharedOptions, VerbEntry};
use crate::commands::verb::Verb;
use crate::context::Context;
use crate::errors::Error;
use crate::exit::Exit;
use crate::output::{Page, Report};
use crate::process::environment;

/// Arguments of `man`.
#[derive(Debug, clap::Args)]
pub(crate) struct ManArgs {
    /// An existing folder
    #[arg(value_name = "DIR")]
    folder: PathBuf,
}

impl Verb for ManArgs {
    const EXAMPLES: &'static [Example] = &[Example {
        wish: "Install the manual",
        line: "holdfast man /usr/local/share/man/man1",
    }];
    const UNUSED: &'static [SharedOptions] = &[SharedOptions::Repository, SharedOptions::Progress];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        run(self, context)
    }
}

/// Report of `man`.
#[derive(Debug, Serialize)]
struct ManReport {
    /// The pages written, in order.
    pages: Vec<PathBuf>,
}

impl Report for ManReport {
    fn command(&self) -> &'static str {
        "man"
    }

    fn is_confirmation(&self) -> bool {
        true
    }

    fn human(&self, page: &mut Page) {
        for path in &self.pages {
            page.line(&path.display().to_string());
        }
    }
}

fn run(args: &ManArgs, context: &Context) -> Result<Exit, Error> {
    let mut pages = Vec::new();
    for (name, text) in manual(context.command_line())? {
        let path = args.folder.join(name);
        write_page(&path, &text).map_err(|source| Error::File {
            action: "write",
            path: path.clone(),
            source,
        })?;
        pages.push(path);
    }
    context.report(&ManReport { pages })
}

fn write_page(path: &Path, text: &[u8]) -> std::io::Result<()> {
    let mut file = File::create(path)?;
    file.write_all(text)?;
    file.sync_all()
}

/// File name and text of each page: the program, then each visible verb.
fn manual(line: &CommandLine) -> Result<Vec<(String, Vec<u8>)>, Error> {
    let mut root = line.tree();
    root.build();
    let mut pages = Vec::new();
    collect(line, &root, "", &mut pages).map_err(Error::Stdout)?;
    Ok(pages)
}

fn collect(
    line: &CommandLine,
    command: &Command,
    path: &str,
    pages: &mut Vec<(String, Vec<u8>)>,
) -> std::io::Result<()> {
    let name = command.get_display_name().unwrap_or_else(|| command.get_name());
    pages.push((format!("{name}.1"), page(line, command, path)?));
    for verb in line.verbs_for_people(path) {
        if let Some(command) = command.find_subcommand(verb.name) {
            let path = format!("{path} {}", verb.name);
            collect(line, command, path.trim_start(), pages)?;
        }
    }
    Ok(())
}

/// The page of `command`, which is the verb at `path`, or the program if `path` is empty.
fn page(line: &CommandLine, command: &Command, path: &str) -> std::io::Result<Vec<u8>> {
    let man = Man::new(command.clone())
        .source(concat!("holdfast ", env!("CARGO_PKG_VERSION")))
        .manual("Holdfast");
    let mut text = Vec::new();
    man.render_title(&mut text)?;
    man.render_name_section(&mut text)?;
    man.render_synopsis_section(&mut text)?;
    man.render_description_section(&mut text)?;
    man.render_options_section(&mut text)?;
    let mut roff = Roff::new();
    if path.is_empty() {
        for group in line.groups {
            roff.control("SH", [group.title.to_uppercase().as_str()]);
            list_verbs(command, group.verbs, &mut roff);
        }
    } else if command.has_subcommands() {
        roff.control("SH", ["COMMANDS"]);
        list_verbs(command, line.verb(path).map_or(&[], |verb| verb.below), &mut roff);
    }
    let examples = line.examples_of(path);
    if !examples.is_empty() {
        roff.control("SH", ["EXAMPLES"]);
    }
    for example in examples {
        roff.control("PP", []);
        roff.text([roman(format!("{}:", example.wish))]);
        roff.control("RS", ["4"]);
        roff.text([bold(example.line)]);
        roff.control("RE", []);
    }
    roff.control("SH", ["EXIT STATUS"]);
    for exit in Exit::ALL {
        roff.control("TP", ["4"]);
        roff.text([bold(exit.code().to_string())]);
        roff.text([roman(exit.meaning())]);
    }
    if path.is_empty() {
        roff.control("SH", ["ENVIRONMENT"]);
        for (name, meaning) in environment::VARIABLES {
            roff.control("TP", []);
            roff.text([bold(name)]);
            roff.text([roman(meaning)]);
        }
        roff.control("PP", []);
        roff.text([roman(environment::PASSWORD_ORDER)]);
    } else {
        roff.control("SH", ["SEE ALSO"]);
        roff.text([bold("holdfast"), roman("(1)")]);
    }
    roff.to_writer(&mut text)?;
    Ok(text)
}

/// Lists the verbs below `command`, each with its page.
fn list_verbs(command: &Command, verbs: &[VerbEntry], roff: &mut Roff) {
    for verb in verbs.iter().filter(|verb| verb.audience == Audience::People) {
        let Some(below) = command.find_subcommand(verb.name) else {
            continue;
        };
        let name = below.get_display_name().unwrap_or(verb.name);
        roff.control("TP", []);
        roff.text([bold(name), roman("(1)")]);
        roff.text([roman(below.get_about().map(ToString::to_string).unwrap_or_default())]);
    }
}

#[cfg(test)]
mod tests {
    use super::manual;
    use crate::commands::COMMAND_LINE;

    #[test]
    fn every_page_has_the_sections_that_people_look_for() {
        let pages = manual(COMMAND_LINE).unwrap();
        let names: Vec<&str> = pages.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names[0], "holdfast.1");
        assert!(names.contains(&"holdfast-version.1"), "{names:?}");
        assert!(!names.contains(&"holdfast-watchdog.1"), "{names:?}");
        for (name, text) in &pages {
            let text = String::from_utf8(text.clone()).unwrap();
            for section in ["NAME", "SYNOPSIS", "DESCRIPTION", "OPTIONS", "EXAMPLES", "EXIT STATUS"] {
                let quoted = format!(".SH \"{section}\"");
                assert!(
                    text.contains(&format!(".SH {section}")) || text.contains(&quoted),
                    "{name} has no {section}:\n{text}"
                );
            }
        }
    }
}
