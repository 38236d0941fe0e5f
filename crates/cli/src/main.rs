//! The program `holdfast`; everything it does is in the library beside this file.

use std::process::ExitCode;

fn main() -> ExitCode {
    holdfast_cli::program::main()
}
