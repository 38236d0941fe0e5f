//! The project's own checks, `cargo xtask tidy`, and its test runner, `cargo xtask test`.
//!
//! The checks cover rules that neither the compiler nor clippy knows: dependencies between modules, banned calls,
//! lengths, links and anchors of documents, unused files. Each rule is a file in `tidy/`; each finding says how to fix
//! it.

#![expect(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a program for a terminal prints"
)]

mod test;
mod tidy;

use std::path::PathBuf;
use std::process::ExitCode;

use test::Scope;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let outcome = match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["tidy"] => find_root().and_then(|root| tidy::check(&root)),
        ["test"] => test::run(Scope::All).map(|()| Vec::new()),
        ["test", "--unit"] => test::run(Scope::Unit).map(|()| Vec::new()),
        _ => Err("usage: cargo xtask tidy | test [--unit]".to_owned()),
    };
    match outcome {
        Ok(findings) if findings.is_empty() => ExitCode::SUCCESS,
        Ok(findings) => {
            for finding in &findings {
                println!("{finding}");
            }
            println!("tidy: {} to fix", findings.len());
            ExitCode::FAILURE
        }
        Err(message) => {
            eprintln!("xtask: {message}");
            ExitCode::from(2)
        }
    }
}

/// The nearest parent directory with the workspace.
fn find_root() -> Result<PathBuf, String> {
    let start = std::env::current_dir().map_err(|error| format!("current directory: {error}"))?;
    start
        .ancestors()
        .find(|directory| {
            std::fs::read_to_string(directory.join("Cargo.toml")).is_ok_and(|text| text.contains("[workspace]"))
        })
        .map(PathBuf::from)
        .ok_or_else(|| format!("{} is in no workspace", start.display()))
}
