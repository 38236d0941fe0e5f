//! Options about readers of file systems.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use holdfast_block::error_messages;
use holdfast_engine::{ApplianceOptions, ReaderChoice, ReaderKind, ReaderOptions};
use holdfast_host::LocalTools;

use super::{machine, reader};
use crate::args::LuksArgs;
use crate::context::Context;
use crate::process::environment;

/// A program of the system that helps to build an appliance.
const TOOL_TIME_OUT: Duration = Duration::from_secs(60);

/// Options about readers.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Options for the reader of file systems")]
pub(super) struct ReaderArgs {
    /// What reads the file system: a process, or a virtual machine with a kernel of Linux
    #[arg(long, value_name = "READER", value_enum, default_value_t)]
    reader: ReaderArg,
    /// Kernel of this virtual machine [env: HOLDFAST_APPLIANCE_KERNEL] [default: one in /boot]
    #[arg(long, value_name = "FILE")]
    appliance_kernel: Option<PathBuf>,
    #[command(flatten)]
    luks: LuksArgs,
}

/// What reads the file system.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
enum ReaderArg {
    /// A process, and the appliance for what that cannot read
    #[default]
    Auto,
    /// A process only
    Process,
    /// The appliance, a virtual machine, only
    Appliance,
}

impl ReaderArgs {
    pub(super) fn choice(&self) -> ReaderChoice {
        match self.reader {
            ReaderArg::Auto => ReaderChoice::Auto,
            ReaderArg::Process => ReaderChoice::Process,
            ReaderArg::Appliance => ReaderChoice::Appliance,
        }
    }

    /// Calls `work` with the options for the engine.
    pub(super) fn with<T>(&self, context: &Context, work: impl FnOnce(&ReaderOptions<'_>) -> T) -> T {
        let tools = LocalTools::new(Arc::clone(context.clock()), TOOL_TIME_OUT);
        let passphrases = || match context.luks_password(&self.luks) {
            Ok(password) => Ok(vec![password.as_bytes().to_vec()]),
            Err(error) => Err(error_messages(&error).join(": ")),
        };
        let named = || context.variable(environment::APPLIANCE_KERNEL).map(PathBuf::from);
        work(&ReaderOptions {
            choice: self.choice(),
            launch: &reader::launch,
            appliance: ApplianceOptions {
                kernel: self.appliance_kernel.clone().or_else(named),
                passphrases: &passphrases,
                launcher: OsString::from(machine::VERB),
                scratch: std::env::temp_dir(),
                tools: &tools,
                clock: Arc::clone(context.clock()),
            },
        })
    }
}

/// The word for a reader in output; it never changes.
pub(super) fn reader_word(reader: ReaderKind) -> &'static str {
    match reader {
        ReaderKind::Process => "process",
        ReaderKind::Appliance => "appliance",
    }
}
