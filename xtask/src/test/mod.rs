//! `cargo xtask test`: builds all test programs at once, and runs them in lanes, with clippy beside them.
//!
//! `cargo test` runs one program after the other. The end-to-end tests mostly wait: for a hypervisor to start, or for
//! ZFS to write. Meanwhile the other programs and clippy use the processors. Two of those run at a time, because most
//! end with one long test, and some wait, too.

#![expect(clippy::disallowed_methods, reason = "it runs cargo and the tests")]

mod checks;
mod outcome;
mod programs;

use std::io::{BufRead as _, BufReader};
use std::process::{Command, Stdio};
use std::sync::Mutex;

use outcome::Outcome;
use programs::TestProgram;

/// Number of threads for the end-to-end tests: more than there are processors, because most of these tests wait.
const WAITING_THREADS: &str = "8";
/// The seed for the order of these tests. In alphabetical order, tests of the same kind would run at the same time: all
/// of them wait, or all of them compute.
const WAITING_ORDER: &str = "1";
/// Number of other programs that run at the same time.
const OTHER_LANE_COUNT: usize = 2;
/// Number of slowest tests to list.
const SLOWEST_COUNT: usize = 10;

/// Which tests to run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scope {
    /// All, and clippy.
    All,
    /// The tests inside the sources, without clippy.
    Unit,
}

/// When the lines of a program are printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Printing {
    /// Immediately.
    Live,
    /// Together, when the program has ended.
    AtItsEnd,
}

/// Builds and runs the tests. Prints their output, the slowest tests and a summary.
///
/// # Errors
/// As text: tests or checks that failed, programs that could not be built or run, or that no test ran.
pub(crate) fn run(scope: Scope) -> Result<(), String> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let (waiting, mut others): (Vec<TestProgram>, Vec<TestProgram>) = programs::build(scope, &cargo)?
        .into_iter()
        .partition(|program| program.name == "e2e");
    // Taken from the end: the long programs first, which are those in the folders `tests`.
    others.sort_by_key(|program| program.source.parent().is_some_and(|folder| !folder.ends_with("src")));
    let (waiting, others) = (Mutex::new(waiting), Mutex::new(others));
    let total = Mutex::new(Outcome::default());
    let lane = |programs: &Mutex<Vec<TestProgram>>, threads: Option<&str>, printing| -> Result<(), String> {
        let next = || Ok::<_, String>(programs.lock().map_err(|error| error.to_string())?.pop());
        while let Some(program) = next()? {
            let outcome = run_program(&program, threads, printing)?;
            total.lock().map_err(|error| error.to_string())?.add(outcome);
        }
        Ok(())
    };
    let checked = std::thread::scope(|threads| {
        let checks = threads.spawn(|| match scope {
            Scope::All => checks::run(&cargo),
            Scope::Unit => Ok(()),
        });
        let lanes = std::iter::once(threads.spawn(|| lane(&waiting, Some(WAITING_THREADS), Printing::Live)));
        let others = || lane(&others, None, Printing::AtItsEnd);
        let lanes: Vec<_> = lanes
            .chain((0..OTHER_LANE_COUNT).map(|_| threads.spawn(others)))
            .collect();
        let panicked = |_| "a lane of tests panicked".to_owned();
        let ended: Vec<Result<(), String>> = lanes.into_iter().map(|lane| lane.join().map_err(panicked)?).collect();
        ended.into_iter().collect::<Result<(), String>>()?;
        checks.join().map_err(panicked)
    })?;
    let total = total.into_inner().map_err(|error| error.to_string())?;
    match (total.report(SLOWEST_COUNT), checked) {
        (Err(tests), Err(checks)) => Err(format!("{tests}\n{checks}")),
        (tests, checks) => tests.and(checks),
    }
}

/// Runs one program in the folder of its package, as `cargo test` does.
fn run_program(program: &TestProgram, threads: Option<&str>, printing: Printing) -> Result<Outcome, String> {
    let failed = |error: std::io::Error| format!("{}: {error}", program.path.display());
    let mut command = Command::new(&program.path);
    // libtest reports times only if unstable options are allowed.
    command
        .args(["-Z", "unstable-options", "--report-time"])
        .env("RUSTC_BOOTSTRAP", "1");
    let order = |count| ["--test-threads", count, "--shuffle-seed", WAITING_ORDER];
    command.args(threads.into_iter().flat_map(order));
    command
        .current_dir(&program.folder)
        .env("CARGO_MANIFEST_DIR", &program.folder);
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(failed)?;
    let mut outcome = Outcome::default();
    let mut lines = vec![format!("     Running {} ({})", program.source.display(), program.name)];
    if printing == Printing::Live {
        println!("{}", lines[0]);
    }
    for line in BufReader::new(child.stdout.take().ok_or("the output of a test is missing")?).split(b'\n') {
        let line = String::from_utf8_lossy(&line.map_err(failed)?).into_owned();
        outcome.read(&line);
        match printing {
            Printing::Live => println!("{line}"),
            Printing::AtItsEnd => lines.push(line),
        }
    }
    if printing == Printing::AtItsEnd {
        println!("{}", lines.join("\n"));
    }
    if !child.wait().map_err(failed)?.success() {
        outcome.fail(&program.name);
    }
    Ok(outcome)
}
