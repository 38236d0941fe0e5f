//! Retries of what fails while a program uses a file system or a volume.

use std::time::Duration;

use holdfast_block::Clock;

const ATTEMPT_COUNT: u32 = 100;
const ATTEMPT_INTERVAL: Duration = Duration::from_millis(50);

/// Repeats `action` for five seconds, while its error is that something is in use.
///
/// Much of what is in use is so for a moment only: a process has just closed its files or was killed, an indexer looks
/// at a new file system, or a process inherited open files and has not yet executed its program, which closes them.
///
/// # Errors
/// The last error of the action.
pub fn retry_while_in_use<T, E>(
    clock: &dyn Clock,
    is_in_use: impl Fn(&E) -> bool,
    mut action: impl FnMut() -> Result<T, E>,
) -> Result<T, E> {
    for _ in 0..ATTEMPT_COUNT {
        match action() {
            Err(error) if is_in_use(&error) => clock.sleep(ATTEMPT_INTERVAL),
            other => return other,
        }
    }
    action()
}

#[cfg(test)]
mod tests {
    use holdfast_block::ManualClock;

    use super::{ATTEMPT_COUNT, retry_while_in_use};

    #[test]
    fn only_what_is_in_use_is_repeated_and_not_for_ever() {
        let clock = ManualClock::new();
        let repeated = |succeeds_at: u32, error: &'static str| {
            let mut count = 0;
            let result = retry_while_in_use(
                &clock,
                |error| *error == "in use",
                || {
                    count += 1;
                    if count == succeeds_at { Ok(()) } else { Err(error) }
                },
            );
            (result, count)
        };
        assert_eq!(repeated(3, "in use"), (Ok(()), 3));
        assert_eq!(repeated(3, "lost"), (Err("lost"), 1));
        assert_eq!(repeated(u32::MAX, "in use"), (Err("in use"), ATTEMPT_COUNT + 1));
    }
}
