//! Splits a partial command line into words.

/// The words of the last command of a line, split as by a shell; the last word is the one at the cursor, and may be
/// empty.
pub(super) fn words(line: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut quote: Option<char> = None;
    let mut is_word = false;
    let mut letters = line.chars();
    while let Some(letter) = letters.next() {
        match (letter, quote) {
            (_, Some(open)) if letter == open => quote = None,
            ('\'' | '"', None) => {
                quote = Some(letter);
                is_word = true;
            }
            ('\\', None | Some('"')) => {
                push(&mut words, letters.next());
                is_word = true;
            }
            (' ' | '\t', None) => {
                if std::mem::take(&mut is_word) {
                    words.push(String::new());
                }
            }
            ('|' | ';' | '&' | '(', None) => {
                words = vec![String::new()];
                is_word = false;
            }
            _ => {
                push(&mut words, Some(letter));
                is_word = true;
            }
        }
    }
    words
}

fn push(words: &mut [String], letter: Option<char>) {
    if let Some(word) = words.last_mut() {
        word.extend(letter);
    }
}

#[cfg(test)]
mod tests {
    use super::words;

    #[test]
    fn a_line_that_is_being_typed_is_split() {
        for (line, expected) in [
            ("holdfast ", &["holdfast", ""][..]),
            ("holdfast  li", &["holdfast", "li"]),
            (
                "sudo true && holdfast list 'a b' c\\ d",
                &["holdfast", "list", "a b", "c d"],
            ),
            (
                "zcat x | holdfast backup - --tag 'un",
                &["holdfast", "backup", "-", "--tag", "un"],
            ),
            ("", &[""]),
        ] {
            assert_eq!(words(line), expected, "{line}");
        }
    }
}
