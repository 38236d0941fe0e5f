//! Suggestions for misspelt words.

/// The most similar of the `known` words, if it is similar enough.
///
/// At most one letter in three may be wrong, missing, added or swapped with the next one (the distance of Damerau and
/// Levenshtein, as "optimal string alignment").
pub fn nearest<'k>(word: &str, known: impl IntoIterator<Item = &'k str>) -> Option<&'k str> {
    let word: Vec<char> = word.chars().take(WORD_MAX).collect();
    let distances = known.into_iter().map(|known| {
        let letters: Vec<char> = known.chars().collect();
        (distance(&word, &letters), known)
    });
    let (distance, known) = distances.min_by_key(|(distance, _)| *distance)?;
    (distance <= word.len().div_ceil(3)).then_some(known)
}

/// Longer than any known word.
const WORD_MAX: usize = 64;

fn distance(from: &[char], to: &[char]) -> usize {
    let mut before_last: Vec<usize> = Vec::new();
    let mut last: Vec<usize> = (0..=to.len()).collect();
    for (row, letter) in from.iter().enumerate() {
        let mut present = vec![row + 1];
        for (column, other) in to.iter().enumerate() {
            let mut best = (last[column] + usize::from(letter != other))
                .min(last[column + 1] + 1)
                .min(present[column] + 1);
            let are_swapped = row > 0 && column > 0 && from[row - 1] == *other && *letter == to[column - 1];
            if are_swapped {
                best = best.min(before_last[column - 1] + 1);
            }
            present.push(best);
        }
        before_last = std::mem::replace(&mut last, present);
    }
    last[to.len()]
}

#[cfg(test)]
mod tests {
    use super::nearest;

    #[test]
    fn slips_of_the_finger_are_found_and_other_words_are_not() {
        let known = ["hourly", "daily", "monthly", "autosnap"];
        let found = |word| nearest(word, known);
        assert_eq!(found("hourly"), Some("hourly"));
        assert_eq!(found("horuly"), Some("hourly"));
        assert_eq!(found("dayly"), Some("daily"));
        assert_eq!(found("auto_snap"), Some("autosnap"));
        assert_eq!(found("montly"), Some("monthly"));
        assert_eq!(found("compression"), None);
        assert_eq!(found(""), None);
        assert_eq!(nearest("daily", []), None);
        assert_eq!(found(&"hourly".repeat(10_000)), None);
    }
}
