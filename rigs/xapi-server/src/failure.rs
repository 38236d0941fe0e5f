//! What XAPI answers when it does not do what it was asked: a code and what it speaks of.

use std::fmt;

/// An error as XAPI gives it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Failure {
    /// `HANDLE_INVALID`, ...
    pub(crate) code: String,
    pub(crate) parameters: Vec<String>,
}

/// What a call gives.
pub(crate) type Answer<T> = Result<T, Failure>;

impl Failure {
    pub(crate) fn new(code: &str, parameters: &[&str]) -> Self {
        Self {
            code: code.to_owned(),
            parameters: parameters.iter().map(|&parameter| parameter.to_owned()).collect(),
        }
    }

    /// From the list that a fault was armed with: the code, then its parameters.
    pub(crate) fn from_words(words: &[String]) -> Self {
        let (code, parameters) = words.split_first().map_or(("", &[][..]), |(first, rest)| (first, rest));
        Self {
            code: code.to_owned(),
            parameters: parameters.to_vec(),
        }
    }

    /// An error that XAPI itself did not foresee.
    pub(crate) fn internal(what: impl fmt::Display) -> Self {
        Self::new("INTERNAL_ERROR", &[&what.to_string()])
    }

    /// The code and its parameters, as `error_info` of a task and `ErrorDescription` hold them.
    pub(crate) fn words(&self) -> Vec<String> {
        std::iter::once(self.code.clone())
            .chain(self.parameters.iter().cloned())
            .collect()
    }
}

impl From<std::io::Error> for Failure {
    fn from(error: std::io::Error) -> Self {
        Self::internal(format!("Unix.Unix_error: {error}"))
    }
}
