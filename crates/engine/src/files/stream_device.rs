//! A stream of known length as a device that is read once, from its start to its end.
//!
//! A copy reads pieces on several threads, in order. So each thread waits until the threads before it have read their
//! pieces, and processes its piece while the next one is read.

use std::io::Read;
use std::ops::Range;
use std::sync::{Condvar, Mutex, PoisonError};

use holdfast_block::{BlockDevice, Error as DeviceError, ExtentKind, ExtentList, Result as DeviceResult};

use crate::job::{Error, Result};

/// The device; every byte of it must be read exactly once.
pub(crate) struct StreamDevice<'a> {
    size_bytes: u64,
    state: Mutex<StreamState<'a>>,
    moved: Condvar,
}

struct StreamState<'a> {
    stream: &'a mut (dyn Read + Send),
    /// Offset of the next byte.
    at: u64,
    /// All later reads fail.
    has_failed: bool,
}

impl<'a> StreamDevice<'a> {
    /// The first `size_bytes` of `stream`.
    pub(crate) fn new(stream: &'a mut (dyn Read + Send), size_bytes: u64) -> Self {
        Self {
            size_bytes,
            state: Mutex::new(StreamState {
                stream,
                at: 0,
                has_failed: false,
            }),
            moved: Condvar::new(),
        }
    }

    /// Checks that the stream ends at the declared size.
    ///
    /// # Errors
    /// The stream is longer, and the disk would lack the rest.
    pub(crate) fn check_end(&self) -> Result<()> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let read = read_up_to(state.stream, &mut [0]).map_err(|source| DeviceError::io("read", state.at, source))?;
        if read == 0 {
            Ok(())
        } else {
            Err(Error::StreamLonger {
                size_bytes: self.size_bytes,
            })
        }
    }
}

impl BlockDevice for StreamDevice<'_> {
    fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> DeviceResult<()> {
        self.check_bounds(offset, buffer.len() as u64)?;
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        while state.at < offset && !state.has_failed {
            state = self.moved.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        if state.has_failed || state.at > offset {
            let gone = std::io::Error::other("a stream is read once, and in order");
            return Err(DeviceError::io("read", offset, gone));
        }
        let outcome = match read_up_to(state.stream, buffer) {
            Ok(count) if count == buffer.len() => Ok(()),
            Ok(count) => Err(DeviceError::io(
                "read",
                offset + count as u64,
                std::io::Error::new(
                    std::io::ErrorKind::UnexpectedEof,
                    "the stream ends before the end of the disk",
                ),
            )),
            Err(source) => Err(DeviceError::io("read", offset, source)),
        };
        state.at += buffer.len() as u64;
        state.has_failed = outcome.is_err();
        drop(state);
        self.moved.notify_all();
        outcome
    }

    fn extents(&self, range: Range<u64>, extent_count_max: usize) -> DeviceResult<ExtentList> {
        let mut list = ExtentList::new(range.start, extent_count_max);
        list.push(range.end - range.start, ExtentKind::Data);
        Ok(list)
    }
}

/// Reads until `buffer` is full or the stream ends; returns the number of bytes.
fn read_up_to(stream: &mut dyn Read, buffer: &mut [u8]) -> std::io::Result<usize> {
    let mut count = 0;
    while count < buffer.len() {
        match stream.read(&mut buffer[count..]) {
            Ok(0) => break,
            Ok(more) => count += more,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(count)
}

#[cfg(test)]
mod tests {
    use holdfast_block::BlockDevice as _;

    use super::StreamDevice;
    use crate::job::Error;

    #[test]
    fn threads_get_their_pieces_in_whatever_order_they_ask() {
        let bytes: Vec<u8> = (0..=255).cycle().take(40_000).collect();
        let mut stream = &bytes[..];
        let device = StreamDevice::new(&mut stream, 40_000);
        std::thread::scope(|scope| {
            for number in (0..40_u64).rev() {
                let (device, bytes) = (&device, &bytes);
                scope.spawn(move || {
                    let mut buffer = vec![0; 1000];
                    device.read_at(&mut buffer, number * 1000).unwrap();
                    let start = usize::try_from(number).unwrap() * 1000;
                    assert_eq!(buffer, bytes[start..start + 1000]);
                });
            }
        });
        device.check_end().unwrap();
        assert!(device.read_at(&mut [0], 5).is_err(), "what was taken is gone");
    }

    #[test]
    fn a_stream_of_another_length_is_an_error_for_all() {
        let mut long = &[1_u8; 101][..];
        let device = StreamDevice::new(&mut long, 100);
        device.read_at(&mut [0; 100], 0).unwrap();
        assert!(matches!(
            device.check_end(),
            Err(Error::StreamLonger { size_bytes: 100 })
        ));

        let mut short = &[1_u8; 150][..];
        let device = StreamDevice::new(&mut short, 300);
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| device.read_at(&mut [0; 100], 200));
            device.read_at(&mut [0; 100], 0).unwrap();
            let error = device.read_at(&mut [0; 100], 100).unwrap_err();
            assert!(format!("{error:?}").contains("ends before"), "{error:?}");
            waits.join().unwrap().unwrap_err();
        });
    }
}
