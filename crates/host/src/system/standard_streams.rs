//! Detection of standard streams that were closed when this program started.
//!
//! Rust opens `/dev/null` in their place before `main`, so that no other file gets their numbers. Output is then lost
//! and input is empty, without an error. So the check runs earlier, in a constructor, which the dynamic loader (or,
//! in static programs, the startup code) calls.
#![expect(
    unsafe_code,
    reason = "a function that is called before main, and one of the C library; the contract stands beside each"
)]

use std::sync::atomic::{AtomicU8, Ordering};

/// A standard stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StandardStream {
    /// Standard input.
    Input = 0,
    /// Standard output.
    Output = 1,
}

/// One bit per closed stream.
static CLOSED: AtomicU8 = AtomicU8::new(0);

// SAFETY: the section holds pointers to functions of the C calling convention, which are called once, on one thread,
// before main.
#[used]
#[unsafe(link_section = ".init_array")]
static CONSTRUCTOR: extern "C" fn() = check_streams;

extern "C" fn check_streams() {
    for number in 0..2 {
        // SAFETY: F_GETFD takes no pointer, and is valid for any number.
        if unsafe { libc::fcntl(number, libc::F_GETFD) } == -1 {
            CLOSED.fetch_or(1 << number, Ordering::Relaxed);
        }
    }
}

impl StandardStream {
    /// Whether the stream was closed when the program started.
    pub fn was_closed(self) -> bool {
        CLOSED.load(Ordering::Relaxed) & 1 << self as u8 != 0
    }
}
