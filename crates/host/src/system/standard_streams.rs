//! Which standard streams were closed by whoever has started this program.
//!
//! Rust puts `/dev/null` in their place before `main`, so that no file of ours gets their numbers. What is written there is lost, and what
//! is read is nothing at all; nobody is told. So it is looked before that: by a constructor, as the dynamic loader and static programs call them.
#![expect(
    unsafe_code,
    reason = "a function that is called before main, and one of the C library; the contract stands beside each"
)]

use std::sync::atomic::{AtomicU8, Ordering};

/// A standard stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StandardStream {
    /// What is read.
    Input = 0,
    /// Where answers go.
    Output = 1,
}

/// A bit for each that was closed.
static CLOSED: AtomicU8 = AtomicU8::new(0);

// SAFETY: the section holds pointers to functions of the C calling convention, which are called once, on one thread, before main.
#[used]
#[unsafe(link_section = ".init_array")]
static LOOK: extern "C" fn() = look;

extern "C" fn look() {
    for number in 0..2 {
        // SAFETY: the question for its flags takes no pointer, and any number will do.
        if unsafe { libc::fcntl(number, libc::F_GETFD) } == -1 {
            CLOSED.fetch_or(1 << number, Ordering::Relaxed);
        }
    }
}

impl StandardStream {
    /// Whether it was closed when the program began.
    pub fn was_closed(self) -> bool {
        CLOSED.load(Ordering::Relaxed) & 1 << self as u8 != 0
    }
}
