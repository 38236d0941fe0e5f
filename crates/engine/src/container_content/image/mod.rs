//! Fills a root folder from an image: the choice of its manifest, and its layers with what they remove.
//!
//! Sources: OCI Image Format Specification 1.1 (image layout, index, manifest, configuration, layer), Docker Image Manifest
//! V2 Schema 2, and the archive of `docker save` (`manifest.json`) before it was an image layout.

mod apply;
mod archive_names;
mod choose;
mod documents;

use std::collections::BTreeMap;
use std::path::Path;

pub(super) use apply::{check_image, fill_from_image};
pub(super) use archive_names::ArchiveNames;

/// Which image of a layout.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ImageChoice {
    /// Its name in the layout (`org.opencontainers.image.ref.name`, or a name with a tag that ends with it), or the digest of
    /// its manifest. Not needed if the layout has one image.
    pub reference: Option<String>,
    /// The platform, if the image is made for several.
    pub platform: ImagePlatform,
}

/// A platform of images. The operating system is Linux.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImagePlatform {
    /// The processor, as in images: `amd64`, `arm64`.
    pub architecture: String,
    /// The variant of the processor: `v7`. Without it, the first one is used.
    pub variant: Option<String>,
}

impl Default for ImagePlatform {
    /// The platform that Holdfast was built for.
    fn default() -> Self {
        let architecture = match std::env::consts::ARCH {
            "x86_64" => "amd64",
            "aarch64" => "arm64",
            "x86" => "386",
            "powerpc64" => "ppc64le",
            other => other,
        };
        Self {
            architecture: architecture.to_owned(),
            variant: None,
        }
    }
}

impl std::fmt::Display for ImagePlatform {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "linux/{}", self.architecture)?;
        match &self.variant {
            Some(variant) => write!(formatter, "/{variant}"),
            None => Ok(()),
        }
    }
}

/// How the programs of an image are meant to run.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ImageConfiguration {
    /// The name of the image in its layout.
    pub reference: Option<String>,
    /// The digest of its manifest; of its configuration for archives of old `docker save`.
    pub digest: String,
    /// `linux/amd64`.
    pub platform: String,
    /// Variables: `NAME=VALUE`.
    pub environment: Vec<String>,
    /// The program and its first arguments.
    pub entrypoint: Vec<String>,
    /// The arguments, or the program if there is no entrypoint.
    pub command: Vec<String>,
    /// The user, by name or number, with an optional group: `www-data:www-data`.
    pub user: String,
    /// The folder to start in.
    pub working_directory: String,
    /// `80/tcp`.
    pub exposed_ports: Vec<String>,
    /// Folders for data that outlives the container.
    pub volumes: Vec<String>,
    /// The signal that asks the program to end: `SIGTERM`.
    pub stop_signal: String,
    /// Free text by name.
    pub labels: BTreeMap<String, String>,
}

fn layout_error(path: &Path, reason: &str) -> crate::Error {
    crate::ContainerContentError::NoLayout {
        path: path.to_owned(),
        reason: reason.to_owned(),
    }
    .into()
}
