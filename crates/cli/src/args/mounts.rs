//! Options of commands that mount.

/// Options of commands that serve files at a mount point.
#[derive(Debug, Clone, Copy, clap::Args)]
pub struct MountOptionArgs {
    /// Allow all users of this host to use the files
    #[arg(long)]
    pub allow_other: bool,
    /// Serve until Ctrl-C instead of in the background; errors of reads are printed
    #[arg(long)]
    pub foreground: bool,
}
