//! Why a text is no calendar expression.

/// Why a text is no [`Calendar`](super::Calendar): which part of it is wrong, and what would be right.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ParseCalendarError {
    /// Nothing at all.
    #[error("a calendar expression is needed: write it like daily, Mon..Fri 02:30 or *:0/15")]
    Nothing,
    /// A word in the place of a day of the week or of a word like `daily`.
    #[error("{word:?} is neither a day of the week nor a word like hourly, daily or weekly{}", meant(nearest.as_deref()))]
    UnknownWord {
        /// The word.
        word: String,
        /// What may be meant.
        nearest: Option<String>,
    },
    /// A range of weekdays that ends before it begins.
    #[error("{text:?} ends before it begins; the week goes from Mon to Sun: write Fri..Sun,Mon for Fri..Mon")]
    WeekdayOrder {
        /// The range.
        text: String,
    },
    /// A part that is neither a date nor a time, or stands where it cannot.
    #[error("{text:?} is not {expected}")]
    Unexpected {
        /// The part.
        text: String,
        /// What should stand there.
        expected: &'static str,
    },
    /// What should be a number.
    #[error("{part} {text:?} is not a number, a list (1,15), a range (1..5), a number with a step (0/15) or *")]
    NotANumber {
        /// Of what.
        part: &'static str,
        /// As it was written.
        text: String,
    },
    /// `*` together with more: it has everything already.
    #[error("{part} {text:?} has more than *, which is everything; a step begins at a number: {from}/2")]
    EveryAndMore {
        /// Of what.
        part: &'static str,
        /// As it was written.
        text: String,
        /// Where a step could begin.
        from: u16,
    },
    /// A number that its part of a date or a time cannot be.
    #[error("{part} {number} does not exist: it is from {least} to {greatest}")]
    OutOfRange {
        /// Of what.
        part: &'static str,
        /// As it was written.
        number: String,
        /// The least that it can be.
        least: u16,
        /// The greatest that it can be.
        greatest: u16,
    },
    /// A range that ends before it begins.
    #[error(
        "{part} {text:?} ends before it begins: write the smaller number first, or two ranges with a comma between them"
    )]
    Order {
        /// Of what.
        part: &'static str,
        /// The range.
        text: String,
    },
    /// A step that is 0, or that leads out of the range at once.
    #[error(
        "{part} {text:?} has a step that reaches nothing: it must be at least 1, and small enough to be taken once"
    )]
    Step {
        /// Of what.
        part: &'static str,
        /// The number with its step.
        text: String,
    },
    /// More numbers between commas than anybody means.
    #[error("{part} has {count} numbers with commas between them, and may have {count_max}: write a range or a step")]
    TooMany {
        /// Of what.
        part: &'static str,
        /// How many there are.
        count: usize,
        /// How many there may be.
        count_max: usize,
    },
    /// A fraction of a second.
    #[error("{text:?} has a fraction of a second; whole seconds are the smallest unit here")]
    SubSecond {
        /// As it was written.
        text: String,
    },
    /// A time zone that the system's database does not have.
    #[error("{name:?} is no time zone that this system knows; write UTC or a name like Europe/Berlin{}", meant(nearest.as_deref()))]
    UnknownZone {
        /// As it was written.
        name: String,
        /// What may be meant.
        nearest: Option<String>,
    },
}

fn meant(nearest: Option<&str>) -> String {
    nearest.map_or_else(String::new, |word| format!("; is {word} meant?"))
}
