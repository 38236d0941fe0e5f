//! A panic is a fault of the program. Other threads may wait forever for the one that has panicked, while a machine is stopped.

use std::io::Write as _;
use std::time::Duration;

use holdfast_block::{Clock as _, SystemClock};

/// How long threads may take to release what they use.
pub const PANIC_GRACE: Duration = Duration::from_secs(5);

/// Ends the process `grace` after a panic if a watchdog then resumes its machines.
pub fn end_after_panic(grace: Duration, has_watchdog: fn() -> bool) {
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        report(panic);
        if has_watchdog() {
            let end = move || {
                SystemClock::new().sleep(grace);
                abort();
            };
            let started = std::thread::Builder::new().name("panic".to_owned()).spawn(end);
            if started.is_err() {
                abort();
            }
        }
    }));
}

fn abort() {
    let message = "holdfast: ended because of this fault; the watchdogs resume the machines";
    writeln!(std::io::stderr(), "{message}").ok();
    std::process::abort();
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt as _;
    use std::process::{Command, Output};
    use std::time::Duration;

    use super::end_after_panic;

    fn panic_in_scope() {
        std::thread::scope(|scope| {
            scope.spawn(|| {
                loop {
                    std::thread::park();
                }
            });
            panic!("a fault");
        });
    }

    #[test]
    #[ignore = "the process of another test"]
    fn watched_process() {
        end_after_panic(Duration::from_millis(50), || true);
        panic_in_scope();
    }

    #[test]
    #[ignore = "the process of another test"]
    fn unwatched_process() {
        end_after_panic(Duration::ZERO, || false);
        std::panic::catch_unwind(|| panic!("a fault")).unwrap_err();
    }

    #[expect(clippy::disallowed_methods, reason = "this test is the program")]
    fn output_of(test: &str) -> Output {
        let test = format!("{}::{test}", module_path!().split_once("::").unwrap().1);
        let mut process = Command::new(std::env::current_exe().unwrap());
        process
            .args(["--ignored", "--exact", "--nocapture", &test])
            .output()
            .unwrap()
    }

    #[test]
    fn a_process_with_a_watchdog_does_not_survive_a_panic() {
        let output = output_of("watched_process");
        assert_eq!(output.status.signal(), Some(6), "{output:?}");
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(
            text.contains("a fault") && text.contains("the watchdogs resume the machines"),
            "{text}"
        );
    }

    #[test]
    fn a_process_without_a_watchdog_survives_a_panic() {
        let output = output_of("unwatched_process");
        assert!(output.status.success(), "{output:?}");
        assert!(
            String::from_utf8_lossy(&output.stdout).contains("1 passed"),
            "{output:?}"
        );
    }
}
