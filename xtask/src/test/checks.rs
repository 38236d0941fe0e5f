//! Checks by cargo that run beside the tests: clippy, and the tests in the documentation.

use std::ffi::OsString;
use std::process::Command;

/// Arguments of cargo for each check.
const CHECKS: [&[&str]; 2] = [
    &[
        "clippy",
        "--quiet",
        "--locked",
        "--workspace",
        "--all-targets",
        "--",
        "-D",
        "warnings",
    ],
    &["test", "--quiet", "--locked", "--workspace", "--doc"],
];

/// Runs the checks at low priority, since tests with timeouts run at the same time.
///
/// # Errors
/// What a check printed, if it failed.
pub(super) fn run(cargo: &OsString) -> Result<(), String> {
    for check in CHECKS {
        let output = Command::new("nice").args(["-n", "19"]).arg(cargo).args(check).output();
        let output = output.map_err(|error| format!("cargo {}: {error}", check[0]))?;
        if !output.status.success() {
            return Err(format!(
                "cargo {} failed:\n{}{}",
                check.join(" "),
                String::from_utf8_lossy(&output.stdout),
                String::from_utf8_lossy(&output.stderr)
            ));
        }
        println!("     Passed: cargo {}", check.join(" "));
    }
    Ok(())
}
