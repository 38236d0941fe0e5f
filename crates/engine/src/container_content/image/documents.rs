//! The documents of an image.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::super::layout::{BlobDigest, BlobName};
use crate::ContainerContentError;
use crate::job::Result;

pub(super) const REF_NAME: &str = "org.opencontainers.image.ref.name";
/// The full name, with the registry and the tag, as containerd and Docker store it.
pub(super) const FULL_NAME: &str = "io.containerd.image.name";

/// A reference to a blob.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct Descriptor {
    pub(super) media_type: String,
    pub(super) digest: String,
    pub(super) size: Option<u64>,
    pub(super) annotations: Option<BTreeMap<String, String>>,
    pub(super) platform: Option<PlatformDocument>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(super) struct PlatformDocument {
    pub(super) architecture: String,
    pub(super) os: String,
    pub(super) variant: Option<String>,
}

/// An index or a manifest: which of them depends on what it has.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct ManifestDocument {
    pub(super) media_type: Option<String>,
    pub(super) schema_version: Option<u64>,
    pub(super) manifests: Option<Vec<Descriptor>>,
    pub(super) config: Option<Descriptor>,
    pub(super) layers: Option<Vec<Descriptor>>,
}

/// The configuration.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct ConfigurationDocument {
    #[serde(flatten)]
    pub(super) platform: PlatformDocument,
    pub(super) config: Option<RunDocument>,
    pub(super) rootfs: Option<LayersDocument>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct LayersDocument {
    pub(super) diff_ids: Option<Vec<String>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub(super) struct RunDocument {
    pub(super) user: Option<String>,
    pub(super) env: Option<Vec<String>>,
    pub(super) entrypoint: Option<Vec<String>>,
    pub(super) cmd: Option<Vec<String>>,
    pub(super) working_dir: Option<String>,
    pub(super) exposed_ports: Option<BTreeMap<String, serde_json::Value>>,
    pub(super) volumes: Option<BTreeMap<String, serde_json::Value>>,
    pub(super) stop_signal: Option<String>,
    pub(super) labels: Option<BTreeMap<String, String>>,
}

/// An image in `manifest.json` of `docker save`.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub(super) struct SavedImage {
    pub(super) config: String,
    pub(super) repo_tags: Option<Vec<String>>,
    pub(super) layers: Vec<String>,
}

impl Descriptor {
    pub(super) fn blob(&self) -> Result<BlobName> {
        Ok(BlobName {
            digest: BlobDigest::parse(&self.digest)?,
            size_bytes: self.size,
            file: None,
        })
    }

    pub(super) fn annotation(&self, name: &str) -> Option<&str> {
        self.annotations.as_ref()?.get(name).map(String::as_str)
    }

    /// The full name of the image, or its tag if it has no full name.
    pub(super) fn name(&self) -> Option<&str> {
        self.annotation(FULL_NAME).or_else(|| self.annotation(REF_NAME))
    }

    /// Whether a user can mean this image: by its tag, its full name, a shorter form of that, or its digest.
    pub(super) fn is_called(&self, reference: &str) -> bool {
        self.digest == reference
            || self.annotation(REF_NAME) == Some(reference)
            || self
                .annotation(FULL_NAME)
                .is_some_and(|full| is_short_for(reference, full))
    }
}

/// Whether `short` is the end of a full name: `debian:12` of `docker.io/library/debian:12`; `debian` means `debian:latest`.
pub(super) fn is_short_for(short: &str, full: &str) -> bool {
    let ends_with = |short: &str| {
        full.strip_suffix(short)
            .is_some_and(|start| start.is_empty() || start.ends_with('/'))
    };
    ends_with(short) || ends_with(&format!("{short}:latest"))
}

pub(super) fn parse<T: DeserializeOwned>(bytes: &[u8], document: &str) -> Result<T> {
    let parsed = serde_json::from_slice(bytes).map_err(|error| ContainerContentError::BadDocument {
        document: document.to_owned(),
        reason: error.to_string(),
    });
    Ok(parsed?)
}

pub(super) fn bad(document: &str, reason: impl Into<String>) -> crate::Error {
    ContainerContentError::BadDocument {
        document: document.to_owned(),
        reason: reason.into(),
    }
    .into()
}
