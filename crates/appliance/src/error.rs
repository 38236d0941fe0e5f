//! Why an appliance cannot be used.

use std::path::PathBuf;

use holdfast_host::ToolError;

/// An appliance cannot be built or started.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ApplianceError {
    /// There is no QEMU.
    #[error("there is no {program} on this host")]
    NoQemu {
        /// The program.
        program: &'static str,
    },
    /// There is no kernel with its modules.
    #[error(
        "there is no kernel with its modules on this host: no /boot/vmlinuz-VERSION that can be read beside /lib/modules/VERSION"
    )]
    NoKernel,
    /// The modules of a kernel are missing.
    #[error("the modules of {} are missing: no lib/modules/{version}", kernel.display())]
    NoModules {
        /// The kernel.
        kernel: PathBuf,
        /// Its version.
        version: String,
    },
    /// The file is no kernel, or does not name its version.
    #[error("{} is no kernel of this architecture", kernel.display())]
    NotAKernel {
        /// The file.
        kernel: PathBuf,
    },
    /// The kernel lacks what every appliance needs.
    #[error("the kernel {version} has no module {module}")]
    NoModule {
        /// Its version.
        version: String,
        /// The module.
        module: &'static str,
    },
    /// A program that a kind of volume needs is missing.
    #[error("{program} is missing, which the appliance needs for {purpose}")]
    NoProgram {
        /// The program.
        program: &'static str,
        /// The kind of volume.
        purpose: &'static str,
    },
    /// A file cannot be read or used.
    #[error("cannot {action} {}", path.display())]
    File {
        /// What was attempted.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The reason.
        source: std::io::Error,
    },
    /// A file is no program of this system.
    #[error("{} is not a program of this system", path.display())]
    NotAProgram {
        /// The file.
        path: PathBuf,
    },
    /// A program of the system that is needed to build the appliance does not work.
    #[error(transparent)]
    Tool(#[from] ToolError),
    /// QEMU does not start.
    #[error("the appliance does not start")]
    Start(#[source] std::io::Error),
    /// Appliances exist for another architecture only.
    #[error("appliances exist on x86_64 only")]
    Architecture,
}

impl ApplianceError {
    pub(super) fn file(action: &'static str, path: impl Into<PathBuf>, source: std::io::Error) -> Self {
        Self::File {
            action,
            path: path.into(),
            source,
        }
    }
}
