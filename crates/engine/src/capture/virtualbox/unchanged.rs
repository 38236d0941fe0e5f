//! A stream that is stored after the disks. Its first byte is returned only if nothing has changed meanwhile, so that
//! no snapshot is committed of a machine that was started while it was read.

use std::io::{Cursor, Read};

use crate::job::Result;

/// Checks that nothing has changed.
pub(super) type ChangeCheck<'a> = Box<dyn FnOnce() -> Result<()> + 'a>;

/// Bytes that come after a check.
pub(super) struct CheckedStream<'a> {
    check: Option<ChangeCheck<'a>>,
    bytes: Cursor<Vec<u8>>,
}

impl<'a> CheckedStream<'a> {
    pub(super) fn new(check: ChangeCheck<'a>, bytes: Vec<u8>) -> Self {
        Self {
            check: Some(check),
            bytes: Cursor::new(bytes),
        }
    }
}

impl Read for CheckedStream<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        if let Some(check) = self.check.take() {
            check().map_err(std::io::Error::other)?;
        }
        self.bytes.read(buffer)
    }
}
