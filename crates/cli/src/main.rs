//! The program `holdfast`; its code is in the library next to this file.

use std::process::ExitCode;

fn main() -> ExitCode {
    holdfast_cli::program::main()
}
