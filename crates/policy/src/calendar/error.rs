//! Errors of parsing a calendar expression.

/// Why a text is not a [`Calendar`](super::Calendar): which part is wrong, and what is expected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ParseCalendarError {
    /// The text is empty.
    #[error("a calendar expression is needed: write it like daily, Mon..Fri 02:30 or *:0/15")]
    Nothing,
    /// An unknown word instead of a weekday or a word like `daily`.
    #[error("{word:?} is neither a day of the week nor a word like hourly, daily or weekly{}", suggestion(nearest.as_deref()))]
    UnknownWord {
        /// The word.
        word: String,
        /// The most similar known word.
        nearest: Option<String>,
    },
    /// A range of weekdays that ends before it begins.
    #[error("{text:?} ends before it begins; the week goes from Mon to Sun: write Fri..Sun,Mon for Fri..Mon")]
    WeekdayOrder {
        /// The range.
        text: String,
    },
    /// A part that is neither a date nor a time, or in the wrong place.
    #[error("{text:?} is not {expected}")]
    Unexpected {
        /// The part.
        text: String,
        /// What is expected there.
        expected: &'static str,
    },
    /// Not a number.
    #[error("{part} {text:?} is not a number, a list (1,15), a range (1..5), a number with a step (0/15) or *")]
    NotANumber {
        /// The component.
        part: &'static str,
        /// The text.
        text: String,
    },
    /// `*` combined with a step or a list: `*` already matches everything.
    #[error("{part} {text:?} combines * with more; a step begins at a number: {from}/2")]
    EveryAndMore {
        /// The component.
        part: &'static str,
        /// The text.
        text: String,
        /// A valid start of a step.
        from: u16,
    },
    /// A number out of the range of its component.
    #[error("{part} {number} is out of range: {least} to {greatest}")]
    OutOfRange {
        /// The component.
        part: &'static str,
        /// The text.
        number: String,
        /// The smallest valid number.
        least: u16,
        /// The largest valid number.
        greatest: u16,
    },
    /// A range that ends before it begins.
    #[error(
        "{part} {text:?} ends before it begins: write the smaller number first, or two ranges with a comma between them"
    )]
    Order {
        /// The component.
        part: &'static str,
        /// The range.
        text: String,
    },
    /// A step that is 0, or larger than the range.
    #[error(
        "{part} {text:?} has a step that reaches nothing: it must be at least 1, and small enough to be taken once"
    )]
    Step {
        /// The component.
        part: &'static str,
        /// The number with its step.
        text: String,
    },
    /// Too many list elements.
    #[error("{part} has {count} numbers with commas between them, and may have {count_max}: write a range or a step")]
    TooMany {
        /// The component.
        part: &'static str,
        /// The number of elements.
        count: usize,
        /// The maximum.
        count_max: usize,
    },
    /// A fraction of a second.
    #[error("{text:?} has a fraction of a second; whole seconds are the smallest unit here")]
    SubSecond {
        /// The text.
        text: String,
    },
    /// A time zone that is not in the system's database.
    #[error("{name:?} is not a time zone of this system; write UTC or a name like Europe/Berlin{}", suggestion(nearest.as_deref()))]
    UnknownZone {
        /// The text.
        name: String,
        /// The most similar known zone.
        nearest: Option<String>,
    },
}

fn suggestion(nearest: Option<&str>) -> String {
    nearest.map_or_else(String::new, |word| format!("; did you mean {word}?"))
}
