//! The options that say where runc and CRIU are.

use std::path::{Path, PathBuf};

use holdfast_engine::RuntimeRequest;
use holdfast_host::LocalTools;

use super::container_tools;
use crate::context::Context;
use crate::errors::Error;

/// runc, CRIU and their folders.
#[derive(Debug, clap::Args)]
pub(super) struct RuntimeProgramArgs {
    /// The folder with the state of runc [default: that of runc]
    #[arg(long, value_name = "FOLDER")]
    runc_root: Option<PathBuf>,
    /// The program runc
    #[arg(long, value_name = "PROGRAM", default_value = "runc")]
    runc_program: PathBuf,
    /// The program CRIU, of version 4.1 or later
    #[arg(long, value_name = "PROGRAM", default_value = "criu")]
    criu: PathBuf,
}

impl RuntimeProgramArgs {
    /// The folder with the state of runc, as an absolute path.
    pub(super) fn root(&self) -> Result<Option<PathBuf>, Error> {
        self.runc_root.as_deref().map(absolute).transpose()
    }

    /// Runs both programs. Newer versions of runc look for CRIU in the search path only.
    pub(super) fn tools(&self, context: &Context) -> LocalTools {
        let tools = container_tools(context);
        let folder = self.criu.parent().filter(|folder| !folder.as_os_str().is_empty());
        match folder.and_then(|folder| std::path::absolute(folder).ok()) {
            Some(folder) => tools.with_program_folder(&folder),
            None => tools,
        }
    }

    /// The container `id` of runc.
    pub(super) fn request<'a>(
        &self,
        id: &str,
        root: Option<PathBuf>,
        tools: &'a LocalTools,
    ) -> Result<RuntimeRequest<'a>, Error> {
        Ok(RuntimeRequest {
            id: id.to_owned(),
            root,
            runc: runnable(&self.runc_program)?,
            criu: runnable(&self.criu)?,
            tools,
        })
    }
}

/// A program that another process, in another folder, finds too. A name without a folder is looked up in the search path.
fn runnable(program: &Path) -> Result<String, Error> {
    let has_folder = program.components().count() > 1;
    let program = if has_folder {
        absolute(program)?
    } else {
        program.to_owned()
    };
    Ok(program.to_string_lossy().into_owned())
}

/// An absolute path: another process may use it.
pub(super) fn absolute(path: &Path) -> Result<PathBuf, Error> {
    std::path::absolute(path).map_err(|source| Error::File {
        action: "look at",
        path: path.to_owned(),
        source,
    })
}
