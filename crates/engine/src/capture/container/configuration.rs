//! The configuration of a container in a snapshot: what a new container needs besides the disk.

#![deny(clippy::indexing_slicing, reason = "a repository may be hostile")]

use std::collections::BTreeMap;

use holdfast_image::{ContainerTree, Format};
use serde::{Deserialize, Serialize};

use crate::job::error::ContainerError;
use crate::job::{Error, Result};
use crate::notes::STREAM_CONTAINER;

const KIND: &str = "holdfast container configuration";
const VERSION: u32 = 1;

/// The configuration of a container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ContainerConfiguration {
    /// The format of its layers.
    pub(crate) format: Format,
    /// Its properties, such as the file system and the configuration of an OCI image.
    pub(crate) properties: BTreeMap<String, String>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct StoredConfiguration {
    kind: String,
    version: u32,
    format: String,
    #[serde(default)]
    properties: BTreeMap<String, String>,
}

impl ContainerConfiguration {
    pub(crate) fn of(tree: &ContainerTree) -> Self {
        Self {
            format: if tree.is_parallels() {
                Format::Parallels
            } else {
                Format::Qcow2
            },
            properties: tree.properties().clone(),
        }
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        let stored = StoredConfiguration {
            kind: KIND.to_owned(),
            version: VERSION,
            format: self.format.name().to_owned(),
            properties: self.properties.clone(),
        };
        let mut text = serde_json::to_vec_pretty(&stored).expect("strings and numbers are valid JSON");
        text.push(b'\n');
        text
    }

    /// Reads the text of a snapshot.
    ///
    /// # Errors
    /// It is damaged, or of a later version.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Self> {
        let wrong = |detail: String| {
            Error::from(ContainerError::Configuration {
                name: STREAM_CONTAINER,
                detail,
            })
        };
        let stored: StoredConfiguration = serde_json::from_slice(bytes).map_err(|error| wrong(error.to_string()))?;
        if stored.kind != KIND || stored.version != VERSION {
            return Err(wrong(format!(
                "it is {:?} of version {}; this program reads version {VERSION}",
                stored.kind, stored.version
            )));
        }
        let format = [Format::Qcow2, Format::Parallels]
            .into_iter()
            .find(|format| format.name() == stored.format)
            .ok_or_else(|| wrong(format!("{:?} is not a format of layers", stored.format)))?;
        Ok(Self {
            format,
            properties: stored.properties,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use holdfast_image::Format;

    use super::ContainerConfiguration;

    #[test]
    fn a_configuration_is_read_as_it_is_written() {
        let configuration = ContainerConfiguration {
            format: Format::Parallels,
            properties: BTreeMap::from([("oci.config".to_owned(), "{\"Env\":[]}".to_owned())]),
        };
        let bytes = configuration.encode();
        assert_eq!(ContainerConfiguration::decode(&bytes).unwrap(), configuration);
        let text = String::from_utf8(bytes).unwrap();
        for (from, to) in [
            ("version\": 1", "version\": 2"),
            ("parallels", "vmdk"),
            ("kind", "sort"),
        ] {
            let damaged = text.replacen(from, to, 1);
            assert_ne!(damaged, text);
            assert!(ContainerConfiguration::decode(damaged.as_bytes()).is_err(), "{damaged}");
        }
        for length in 0..text.len() - 2 {
            assert!(ContainerConfiguration::decode(&text.as_bytes()[..length]).is_err());
        }
    }
}
