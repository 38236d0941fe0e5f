//! The test programs of the workspace, built by cargo.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use serde_json::Value;

use super::Scope;

/// A program with tests.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct TestProgram {
    /// The name of the cargo target, such as "e2e".
    pub(super) name: String,
    /// The main source file.
    pub(super) source: PathBuf,
    /// The path of the program.
    pub(super) path: PathBuf,
    /// The folder of the package.
    pub(super) folder: PathBuf,
}

/// Builds the test programs.
pub(super) fn build(scope: Scope, cargo: &OsString) -> Result<Vec<TestProgram>, String> {
    let mut command = Command::new(cargo);
    command.args(["test", "--locked", "--workspace", "--lib", "--bins", "--no-run"]);
    command.args((scope == Scope::All).then_some("--tests"));
    command.arg("--message-format=json-render-diagnostics");
    let output = command
        .stderr(Stdio::inherit())
        .output()
        .map_err(|error| format!("cargo: {error}"))?;
    if !output.status.success() {
        return Err("the tests do not build (see above)".to_owned());
    }
    let messages = String::from_utf8_lossy(&output.stdout);
    Ok(messages.lines().filter_map(test_program).collect())
}

/// The test program in a message of cargo, if there is one.
fn test_program(message: &str) -> Option<TestProgram> {
    let message: Value = serde_json::from_str(message).ok()?;
    if message["profile"]["test"] != true {
        return None;
    }
    Some(TestProgram {
        name: message["target"]["name"].as_str()?.to_owned(),
        source: message["target"]["src_path"].as_str()?.into(),
        path: message["executable"].as_str()?.into(),
        folder: PathBuf::from(message["manifest_path"].as_str()?).parent()?.to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::{TestProgram, test_program};

    #[test]
    fn reads_test_programs_from_messages() {
        let message = r#"{"reason":"compiler-artifact","manifest_path":"/src/crates/cli/Cargo.toml","target":{"kind":["test"],
            "name":"e2e","src_path":"/src/crates/cli/tests/e2e/main.rs"},"profile":{"test":true},"executable":"/t/e2e-5e95"}"#;
        let expected = TestProgram {
            name: "e2e".to_owned(),
            source: "/src/crates/cli/tests/e2e/main.rs".into(),
            path: "/t/e2e-5e95".into(),
            folder: "/src/crates/cli".into(),
        };
        assert_eq!(test_program(message), Some(expected));
        assert_eq!(test_program(&message.replace("true", "false")), None);
        assert_eq!(test_program(r#"{"reason":"build-finished","success":true}"#), None);
        assert_eq!(test_program("not JSON"), None);
    }
}
