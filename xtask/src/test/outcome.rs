//! The results of test programs, from the output of libtest.

/// Number of lines that are repeated of the output of a failed test: the message and the backtrace come first.
const OUTPUT_LINE_COUNT_MAX: usize = 60;

/// The results of some programs.
#[derive(Debug, Default)]
pub(super) struct Outcome {
    passed: u64,
    ignored: u64,
    /// Names of failed tests, and of programs that failed without naming a test.
    failed: Vec<String>,
    /// The output of the failed tests, each under a line with its name.
    output_of_failed: Vec<String>,
    section: Section,
    /// Seconds and names.
    times: Vec<(f64, String)>,
}

/// The part of libtest's output that a line belongs to.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum Section {
    #[default]
    Tests,
    /// The output of the failed tests; holds the number of lines of the current one.
    OutputOfFailed(usize),
    NamesOfFailed,
}

impl Outcome {
    /// Parses a line of a program's output.
    pub(super) fn read(&mut self, line: &str) {
        self.section = match self.section {
            Section::Tests if line == "failures:" => Section::OutputOfFailed(0),
            Section::OutputOfFailed(_) if line == "failures:" => Section::NamesOfFailed,
            Section::OutputOfFailed(_) if line.starts_with("---- ") => {
                self.output_of_failed.push(line.to_owned());
                Section::OutputOfFailed(0)
            }
            Section::OutputOfFailed(number) => {
                if number < OUTPUT_LINE_COUNT_MAX {
                    self.output_of_failed.push(line.to_owned());
                }
                Section::OutputOfFailed(number + 1)
            }
            section => section,
        };
        if let Some(counts) = line.strip_prefix("test result: ") {
            self.passed += count(counts, " passed");
            self.ignored += count(counts, " ignored");
        } else if let Some((name, rest)) = line.strip_prefix("test ").and_then(|line| line.split_once(" ... ")) {
            if rest.starts_with("FAILED") {
                self.failed.push(name.to_owned());
            }
            let seconds = rest.split_once('<').and_then(|(_, time)| time.strip_suffix("s>"));
            if let Some(seconds) = seconds.and_then(|seconds| seconds.parse().ok()) {
                self.times.push((seconds, name.to_owned()));
            }
        }
    }

    /// Records that a program failed.
    pub(super) fn fail(&mut self, program: &str) {
        if self.failed.is_empty() {
            self.failed.push(format!("the program {program}"));
        }
    }

    /// Adds the results of another program.
    pub(super) fn add(&mut self, other: Self) {
        self.passed += other.passed;
        self.ignored += other.ignored;
        self.failed.extend(other.failed);
        self.output_of_failed.extend(other.output_of_failed);
        self.times.extend(other.times);
    }

    /// Prints the slowest tests, the output of failed tests again, and the summary.
    ///
    /// # Errors
    /// The tests that failed; or that no test ran.
    pub(super) fn report(mut self, slowest_count: usize) -> Result<(), String> {
        println!("\nThe slowest tests:");
        self.times.sort_by(|left, right| right.0.total_cmp(&left.0));
        for (seconds, name) in self.times.iter().take(slowest_count) {
            println!("{seconds:8.1} s  {name}");
        }
        if !self.output_of_failed.is_empty() {
            println!(
                "\nThe output of the failed tests:\n{}",
                self.output_of_failed.join("\n")
            );
        }
        if !self.failed.is_empty() {
            return Err(format!(
                "{} tests failed:\n  {}",
                self.failed.len(),
                self.failed.join("\n  ")
            ));
        }
        if self.passed == 0 {
            return Err("no test ran".to_owned());
        }
        println!("{} tests passed, {} ignored", self.passed, self.ignored);
        Ok(())
    }
}

/// The number before `word` in libtest's summary line.
fn count(sum: &str, word: &str) -> u64 {
    let before = sum.split_once(word).map_or("", |(before, _)| before);
    before
        .rsplit(' ')
        .next()
        .and_then(|number| number.parse().ok())
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::Outcome;

    fn outcome(lines: &str) -> Outcome {
        let mut outcome = Outcome::default();
        lines.lines().for_each(|line| outcome.read(line));
        outcome
    }

    #[test]
    fn counts_and_times_are_read() {
        let read = outcome(
            "running 3 tests\n\
             test a::quick ... ok <0.012s>\n\
             test a::slow ... ok <12.500s>\n\
             test a::long ... ignored, the longer, the better\n\n\
             test result: ok. 2 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 12.51s",
        );
        assert_eq!((read.passed, read.ignored), (2, 1));
        assert_eq!(
            read.times,
            [(0.012, "a::quick".to_owned()), (12.5, "a::slow".to_owned())]
        );
        assert_eq!(read.report(10), Ok(()));
    }

    #[test]
    fn failures_are_named() {
        let read = outcome(
            "test a::wrong ... FAILED <0.100s>\n\
             test result: FAILED. 0 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.10s",
        );
        assert_eq!(read.report(10), Err("1 tests failed:\n  a::wrong".to_owned()));
    }

    #[test]
    fn the_start_of_the_output_of_failed_tests_is_kept() {
        let long = "line\n".repeat(super::OUTPUT_LINE_COUNT_MAX + 1);
        let read = outcome(&format!(
            "test a::long ... FAILED <0.100s>\n\nfailures:\n\n---- a::long stdout ----\n{long}\n\
             ---- a::wrong stdout ----\n3 is not 4\n\nfailures:\n    a::long\n"
        ));
        let mut expected = vec!["", "---- a::long stdout ----"];
        expected.extend(["line"; super::OUTPUT_LINE_COUNT_MAX]);
        expected.extend(["---- a::wrong stdout ----", "3 is not 4", ""]);
        assert_eq!(read.output_of_failed, expected);
    }

    #[test]
    fn a_program_that_crashes_has_failed() {
        let mut read = outcome("running 1 test");
        read.fail("e2e");
        assert_eq!(read.report(10), Err("1 tests failed:\n  the program e2e".to_owned()));
    }

    #[test]
    fn that_nothing_ran_is_an_error() {
        assert_eq!(outcome("running 0 tests").report(10), Err("no test ran".to_owned()));
    }
}
