//! Errors of XAPI: a code and its parameters.

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

impl Failure {
    /// The failure that an error of a stream carries.
    pub(crate) fn carried_by(error: &std::io::Error) -> Option<Self> {
        error.get_ref().and_then(|inner| inner.downcast_ref::<Self>()).cloned()
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.words().join(" "))
    }
}

impl std::error::Error for Failure {}

impl From<std::io::Error> for Failure {
    fn from(error: std::io::Error) -> Self {
        Self::carried_by(&error).unwrap_or_else(|| Self::internal(format!("Unix.Unix_error: {error}")))
    }
}
