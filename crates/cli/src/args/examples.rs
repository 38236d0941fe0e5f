//! Examples as data: shown in the help and the manual, and parsed by a test.

/// One way to use a verb.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Example {
    /// The task, as a user would word it.
    pub wish: &'static str,
    /// The command line that does it.
    pub line: &'static str,
}

/// The Examples section of a help text.
pub fn examples_help(examples: &[Example]) -> String {
    let paragraphs: Vec<String> = examples
        .iter()
        .map(|example| format!("  {}:\n    {}", example.wish, example.line))
        .collect();
    paragraphs.join("\n\n")
}

impl Example {
    /// The words after `holdfast`, split as by a shell; `None` if the line does not start the program.
    ///
    /// Supports quotes (`'...'`, `"..."`), pipes and redirections; examples need nothing else.
    pub fn arguments(&self) -> Option<Vec<String>> {
        let stages = shell_stages(self.line);
        let words = stages
            .into_iter()
            .find(|words| words.first().is_some_and(|word| word == "holdfast"))?;
        Some(words.into_iter().skip(1).collect())
    }
}

/// The words of each stage of a pipeline, without redirections.
fn shell_stages(line: &str) -> Vec<Vec<String>> {
    let mut stages = vec![Vec::new()];
    let mut word: Option<String> = None;
    let mut quote: Option<char> = None;
    let mut is_redirection = false;
    for character in line.chars().chain([' ']) {
        match (character, quote) {
            (_, Some(open)) if character == open => quote = None,
            ('\'' | '"', None) => {
                quote = Some(character);
                word.get_or_insert_default();
            }
            (' ' | '|' | '>' | '<', None) => {
                if let Some(word) = word.take()
                    && !std::mem::take(&mut is_redirection)
                    && let Some(stage) = stages.last_mut()
                {
                    stage.push(word);
                }
                match character {
                    '|' => stages.push(Vec::new()),
                    '>' | '<' => is_redirection = true,
                    _ => {}
                }
            }
            // Inside quotes, and for ordinary characters.
            _ => word.get_or_insert_default().push(character),
        }
    }
    stages
}

#[cfg(test)]
mod tests {
    use super::{Example, examples_help};

    fn arguments(line: &'static str) -> Option<Vec<String>> {
        Example { wish: "", line }.arguments()
    }

    #[test]
    fn a_line_is_split_like_a_shell_does() {
        assert_eq!(arguments("holdfast list").unwrap(), ["list"]);
        assert_eq!(
            arguments(r#"zfs send x | holdfast backup - --tag 'a  b' --machine "it's" > log"#).unwrap(),
            ["backup", "-", "--tag", "a  b", "--machine", "it's"]
        );
        assert_eq!(arguments("holdfast x < in y").unwrap(), ["x", "y"]);
        assert_eq!(arguments("echo holdfast"), None);
    }

    #[test]
    fn help_shows_the_wish_above_the_line() {
        let example = |wish, line| Example { wish, line };
        assert_eq!(
            examples_help(&[
                example("See all", "holdfast list"),
                example("See one", "holdfast show x")
            ]),
            "  See all:\n    holdfast list\n\n  See one:\n    holdfast show x"
        );
    }
}
