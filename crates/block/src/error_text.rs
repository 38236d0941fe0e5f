//! An error with its causes, as text.

use std::error::Error;

/// The messages of `error` and of its causes, from the outermost to the innermost; never empty.
///
/// A cause is left out if the message before it already ends with its text.
pub fn error_messages(error: &dyn Error) -> Vec<String> {
    let mut messages = vec![error.to_string()];
    let mut cause = error.source();
    while let Some(error) = cause {
        let message = error.to_string();
        if messages.last().is_none_or(|last| !last.ends_with(&message)) {
            messages.push(message);
        }
        cause = error.source();
    }
    messages
}

/// The messages on one line: `copy the disk: read "a.qcow2": Input/output error`.
pub fn error_text(error: &dyn Error) -> String {
    error_messages(error).join(": ")
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::{error_messages, error_text};

    #[derive(Debug, thiserror::Error)]
    enum Failure {
        #[error("copy the disk")]
        Copy(#[source] Box<Failure>),
        #[error("read: {0}")]
        Read(#[source] io::Error),
        #[error(transparent)]
        Io(io::Error),
    }

    #[test]
    fn causes_follow_in_order() {
        let error = Failure::Copy(Box::new(Failure::Io(io::Error::other("no medium"))));
        assert_eq!(error_messages(&error), ["copy the disk", "no medium"]);
        assert_eq!(error_text(&error), "copy the disk: no medium");
    }

    #[test]
    fn a_cause_that_its_effect_quotes_is_named_once() {
        let error = Failure::Copy(Box::new(Failure::Read(io::Error::other("no medium"))));
        assert_eq!(error_text(&error), "copy the disk: read: no medium");
    }
}
