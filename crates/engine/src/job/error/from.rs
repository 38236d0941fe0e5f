//! Converts errors of lower crates to errors of a job, and adds what they do not know.

use holdfast_host::provider::ProviderError;
use holdfast_repo::key::KeyError;
use holdfast_repo::store::StoreError;

use super::Error;
use crate::Interrupted;

impl From<holdfast_host::Error> for Error {
    fn from(error: holdfast_host::Error) -> Self {
        Self::Host(Box::new(error))
    }
}

impl From<crate::ContainerError> for Error {
    fn from(error: crate::ContainerError) -> Self {
        Self::Container(Box::new(error))
    }
}

impl From<crate::ContainerContentError> for Error {
    fn from(error: crate::ContainerContentError) -> Self {
        Self::ContainerContent(Box::new(error))
    }
}

impl From<crate::GuestFilesError> for Error {
    fn from(error: crate::GuestFilesError) -> Self {
        Self::GuestFiles(Box::new(error))
    }
}

impl From<holdfast_repo::Error> for Error {
    fn from(error: holdfast_repo::Error) -> Self {
        match error {
            holdfast_repo::Error::Cancelled => Self::Interrupted(Interrupted),
            other => Self::Repository(other),
        }
    }
}

impl From<StoreError> for Error {
    fn from(error: StoreError) -> Self {
        Self::Repository(error.into())
    }
}

impl From<KeyError> for Error {
    fn from(error: KeyError) -> Self {
        Self::Repository(error.into())
    }
}

impl From<ProviderError> for Error {
    fn from(error: ProviderError) -> Self {
        Self::Provider(Box::new(error))
    }
}

impl Error {
    /// Adds the path of the file to an error of a device: devices do not know their path.
    pub(crate) fn on(self, path: &std::path::Path) -> Self {
        match self {
            Self::Device(source @ holdfast_block::Error::Io { .. })
            | Self::Image(holdfast_image::Error::Device(source @ holdfast_block::Error::Io { .. })) => Self::Medium {
                path: path.to_owned(),
                source,
            },
            other => other,
        }
    }
}
