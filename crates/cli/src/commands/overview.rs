//! The output of `holdfast` without arguments, and the groups of verbs in its help.

use clap::Command;
use clap::builder::styling::Styles;

use super::GROUPS;
use crate::args::Audience;

/// The verbs that a new user needs first.
const COMMON: [&str; 5] = ["init", "machines", "backup", "list", "restore"];

/// The verbs of `root` in their groups, for the help.
pub(super) fn grouped_verbs(root: &Command, styles: &Styles) -> String {
    let header = styles.get_header();
    let groups = GROUPS.iter().map(|group| {
        let shown = group.verbs.iter().filter(|verb| verb.audience == Audience::People);
        let rows: Vec<String> = shown.map(|verb| row(root, verb.name, styles)).collect();
        format!("{header}{}:{header:#}\n{}", group.title, rows.join("\n"))
    });
    groups.collect::<Vec<_>>().join("\n\n")
}

/// A verb and its description.
fn row(root: &Command, name: &str, styles: &Styles) -> String {
    let literal = styles.get_literal();
    let about = root
        .find_subcommand(name)
        .and_then(Command::get_about)
        .map(ToString::to_string)
        .unwrap_or_default();
    let gap = " ".repeat(NAME_WIDTH.saturating_sub(name.len()));
    format!("  {literal}{name}{literal:#}{gap}{about}")
}

/// Width of the column of names, with the gap after the longest.
const NAME_WIDTH: usize = "completions".len() + 2;

/// The output if no verb is given: one screen, with a pointer to the full help.
pub fn short_screen(root: &Command) -> String {
    let styles = root.get_styles();
    let (header, literal) = (styles.get_header(), styles.get_literal());
    let rows: Vec<String> = COMMON.iter().map(|name| row(root, name, styles)).collect();
    let about = root.get_about().map(ToString::to_string).unwrap_or_default();
    format!(
        "holdfast {}: {about}\n\n\
         {header}Usage:{header:#} holdfast [OPTIONS] <COMMAND>\n\n\
         {header}Common commands:{header:#}\n{}\n\n\
         {literal}holdfast help{literal:#}          lists all commands\n\
         {literal}holdfast help backup{literal:#}   shows the options and examples of a command\n",
        env!("CARGO_PKG_VERSION"),
        rows.join("\n")
    )
}

#[cfg(test)]
mod tests {
    use super::{COMMON, short_screen};
    use crate::args::Audience;
    use crate::commands::{COMMAND_LINE, GROUPS};

    #[test]
    fn every_verb_is_in_one_group_and_fits_into_a_line() {
        let tree = COMMAND_LINE.tree();
        let names: Vec<&str> = GROUPS
            .iter()
            .flat_map(|group| group.verbs.iter().map(|verb| verb.name))
            .collect();
        let in_tree: Vec<&str> = tree.get_subcommands().map(clap::Command::get_name).collect();
        assert_eq!(names, in_tree);
        for verb in tree.get_subcommands() {
            let about = verb.get_about().unwrap().to_string();
            assert!(about.len() <= 65, "{}: {about}", verb.get_name());
        }
    }

    #[test]
    fn the_short_screen_is_short_and_shows_verbs_for_people() {
        let screen = short_screen(&COMMAND_LINE.tree());
        assert!(screen.lines().count() <= 25, "{screen}");
        for name in COMMON {
            assert!(
                COMMAND_LINE
                    .verb(name)
                    .is_some_and(|verb| verb.audience == Audience::People),
                "{name}"
            );
        }
    }
}
