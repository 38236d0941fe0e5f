//! Errors of XAPI: a code and its parameters.

use std::fmt;

/// An error in XAPI's form.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Failure {
    /// The code: `HANDLE_INVALID`, ...
    pub(crate) code: String,
    pub(crate) parameters: Vec<String>,
}

/// The result of a call.
pub(crate) type Answer<T> = Result<T, Failure>;

impl Failure {
    pub(crate) fn new(code: &str, parameters: &[&str]) -> Self {
        Self {
            code: code.to_owned(),
            parameters: parameters.iter().map(|&parameter| parameter.to_owned()).collect(),
        }
    }

    /// Converts the list of an armed fault: the code, then its parameters.
    pub(crate) fn from_words(words: &[String]) -> Self {
        let (code, parameters) = words.split_first().map_or(("", &[][..]), |(first, rest)| (first, rest));
        Self {
            code: code.to_owned(),
            parameters: parameters.to_vec(),
        }
    }

    /// An internal error of XAPI.
    pub(crate) fn internal(what: impl fmt::Display) -> Self {
        Self::new("INTERNAL_ERROR", &[&what.to_string()])
    }

    /// The code and its parameters, as in `error_info` of a task and in `ErrorDescription`.
    pub(crate) fn words(&self) -> Vec<String> {
        std::iter::once(self.code.clone())
            .chain(self.parameters.iter().cloned())
            .collect()
    }
}

impl Failure {
    /// The failure inside an I/O error of a stream.
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
