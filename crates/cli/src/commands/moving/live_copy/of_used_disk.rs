//! A raw disk that a program writes, and that commands freeze.

use std::ffi::OsString;
use std::os::unix::fs::FileTypeExt as _;
use std::path::Path;
use std::time::Duration;

use holdfast_block::{BlockDevice, FileDevice, IoMode};
use holdfast_host::LineProcess;
use holdfast_image::Format;
use holdfast_live_copy::{CommandFreezer, ComparedSource, PriorContent};

use super::super::copy_target::CopyTarget;
use super::report::CopiedFrom;
use super::{FROZEN_MAX_DEFAULT, GUARD_TIME, LiveCopyArgs, NamedSource, layout_of};
use crate::context::Context;
use crate::errors::Error;
use crate::exit::Exit;

/// How long the commands may take.
const COMMAND_TIME_MAX: Duration = Duration::from_secs(60);

impl LiveCopyArgs {
    /// Copies a raw file or a block device. `commands` freeze and thaw what writes to it.
    pub(super) fn copy_used_disk(
        &self,
        commands: [&String; 2],
        path: &Path,
        target: &CopyTarget,
        context: &Context,
    ) -> Result<Exit, Error> {
        if self.format.is_some_and(|format| format != Format::Raw) {
            return Err(Error::usage(
                "an image of another format than raw cannot be read while another program writes to it",
                "remove the option --format, or shut the program down and remove --freeze-command",
            ));
        }
        // What a file system writes to a device passes the page cache of the device by.
        let is_block_device = path
            .metadata()
            .is_ok_and(|metadata| metadata.file_type().is_block_device());
        let mode = if is_block_device {
            IoMode::Direct
        } else {
            IoMode::Buffered
        };
        let device = FileDevice::open(path, mode)?;
        self.copy_compared(commands, &device, target, &NamedSource::of_path(path), context)
    }

    /// Copies a device that is read again for each round, and compared.
    pub(super) fn copy_compared(
        &self,
        commands: [&String; 2],
        device: &dyn BlockDevice,
        target: &CopyTarget,
        name: &NamedSource,
        context: &Context,
    ) -> Result<Exit, Error> {
        let commands = commands.map(Clone::clone);
        let thaw_after = self.freezing.max_frozen(FROZEN_MAX_DEFAULT) * 2 + GUARD_TIME;
        let launch = move || {
            let program = std::env::current_exe()?;
            let [freeze, thaw] = commands.clone();
            let words: Vec<OsString> = vec![
                "freeze-commands".into(),
                freeze.into(),
                thaw.into(),
                "--thaw-after".into(),
                thaw_after.as_millis().to_string().into(),
                "--command-time".into(),
                COMMAND_TIME_MAX.as_millis().to_string().into(),
            ];
            LineProcess::start(&program.into(), &words)
        };
        let freezer = CommandFreezer::start(Box::new(launch), COMMAND_TIME_MAX).map_err(|source| Error::File {
            action: "start",
            path: "/proc/self/exe".into(),
            source,
        })?;
        let layout = layout_of(device, PriorContent::of_seed(self.seed.as_ref()))?;
        let source = ComparedSource::new(device, layout, &freezer);
        self.copy(&source, target, name, CopiedFrom::Frozen, context)
    }
}
