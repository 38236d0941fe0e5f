//! What a host lacks for a QEMU that would be started on it.

use std::path::Path;
use std::time::Duration;

use holdfast_block::Clock;

use super::CommandLine;
use crate::qemu::QemuVersion;
use crate::system::process::{Call, CallOutput, ProcessOutcome};

/// How long a program may take to describe itself.
const TIME_OUT: Duration = Duration::from_secs(20);

impl CommandLine {
    /// What prevents it from being started on this host, for users of the other one.
    pub(in super::super) fn missing_here(&self, clock: &dyn Clock) -> Vec<String> {
        let mut missing = Vec::new();
        if !self.folder.is_dir() {
            missing.push(format!("the folder {} does not exist there", self.folder.display()));
        }
        missing.extend(self.user_missing(clock));
        missing.extend(self.variables_missing());
        let program = self.program.display();
        let asked = |arguments: &[&str]| ask(&self.program, arguments, clock);
        let Some(answer) = asked(&["--version"]) else {
            missing.push(format!("there is no {program}"));
            return missing;
        };
        match QemuVersion::in_text(&answer) {
            Some(version) if version < self.version => {
                missing.push(format!(
                    "QEMU there is {version}, which is older than {} here",
                    self.version
                ));
            }
            Some(_) => {}
            None => missing.push(format!("{program} there is not a QEMU")),
        }
        let types = asked(&["-machine", "help"]).unwrap_or_default();
        let is_type = |line: &str| line.split_whitespace().next() == Some(&self.machine_type);
        if !types.lines().any(is_type) {
            missing.push(format!("QEMU there has no machine type {}", self.machine_type));
        }
        missing
    }

    fn user_missing(&self, clock: &dyn Clock) -> Option<String> {
        let (user, _) = self.user?;
        let found = ask(Path::new("getent"), &["passwd", &user.to_string()], clock);
        found
            .is_none()
            .then(|| format!("there is no user with the number {user}, as which its QEMU runs here"))
    }

    /// A file of another size, or of another process, is not that of this machine.
    fn variables_missing(&self) -> Option<String> {
        let (path, size_bytes) = self.variables.as_ref()?;
        let found = path.metadata().ok()?;
        (found.len() != *size_bytes).then(|| format!("{} exists there with another size", path.display()))
    }
}

/// The output of a program that exists, and succeeds.
fn ask(program: &Path, arguments: &[&str], clock: &dyn Clock) -> Option<String> {
    let call = Call {
        program,
        arguments,
        variables: &[("LC_ALL", "C".to_owned())],
        withheld: &[],
        input: &[],
        time_out: TIME_OUT,
        is_stopped: &|| false,
    };
    match call.run(clock) {
        Ok(CallOutput {
            outcome: ProcessOutcome::Success,
            lines,
        }) => Some(lines.join("\n")),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use holdfast_block::SystemClock;

    use super::CommandLine;
    use crate::qemu::QemuVersion;

    #[test]
    fn what_a_host_lacks_is_listed() {
        let folder = tempfile::tempdir().unwrap();
        let variables = folder.path().join("vars");
        std::fs::File::create(&variables).unwrap();
        let mut line = CommandLine::of_words(&[]);
        line.folder = folder.path().to_owned();
        assert_eq!(line.missing_here(&SystemClock::new()), [""; 0]);
        line.version = QemuVersion::new(99, 0, 0);
        line.machine_type = "pc-q35-99.0".to_owned();
        line.user = Some((4_000_000_000, 0));
        line.variables = Some((variables, 540_672));
        line.folder = "/does/not/exist".into();
        let missing = line.missing_here(&SystemClock::new());
        for part in [
            "/does/not/exist",
            "4000000000",
            "another size",
            "older than 99.0.0",
            "pc-q35-99.0",
        ] {
            assert!(missing.iter().any(|text| text.contains(part)), "{part}: {missing:?}");
        }
        line.program = "/does/not/exist/qemu".into();
        assert!(
            line.missing_here(&SystemClock::new())
                .last()
                .unwrap()
                .contains("there is no /does/not")
        );
    }
}
