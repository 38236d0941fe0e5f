//! Byte streams between the two sides.

use std::io::{Read, Write};

/// A byte stream in both directions.
pub struct ByteStream {
    /// What the other side sends.
    pub input: Box<dyn Read + Send>,
    /// What this side sends. It ends when this is dropped.
    pub output: Box<dyn Write + Send>,
    /// Ends the stream from any thread.
    pub closer: Box<dyn StreamCloser>,
}

/// Ends a byte stream.
pub trait StreamCloser: Send + Sync {
    /// Ends both directions, so that no read or write waits any more. Returns the reason that the other side gave, if it
    /// has ended with an error.
    fn close(&self) -> Option<String>;
}
