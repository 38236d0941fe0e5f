//! `init`: creates a repository.

use holdfast_repo::key::{Cipher, Credential, KdfParameters, PaperKey};
use holdfast_repo::store::Store;
use holdfast_repo::{Environment, Repository, RepositoryId};

use super::keys::check_password;
use super::sighting::note_new;
use crate::files::atomic_file::{check_folder, folder_of};
use crate::job::{Error, Result};
use crate::{Location, Protection};

/// What protects a new repository.
#[derive(Clone, Copy)]
pub enum NewProtection<'a> {
    /// A password, which must not be weak.
    Password(&'a [u8]),
    /// None: every reader of the store can read the disks.
    Nothing,
}

/// Parameters of a new repository.
pub struct InitRequest<'a> {
    /// Its location.
    pub location: &'a Location,
    /// Its protection.
    pub protection: NewProtection<'a>,
    /// The label of its first key slot.
    pub label: &'a str,
    /// The cipher for all its content.
    pub cipher: Cipher,
    /// A repository to deduplicate alike with, so that data copied between the two is stored once.
    pub like: Option<&'a Repository>,
}

/// A repository that was created.
#[derive(Debug)]
pub struct InitReport {
    /// Its identity.
    pub id: RepositoryId,
    /// The store, as it describes itself.
    pub store: String,
    /// The cipher for all its content.
    pub cipher: Cipher,
    /// Its secret, to be printed on paper.
    pub paper_key: PaperKey,
}

/// Creates a repository: the directory if it does not exist, one key slot, and the configuration.
pub fn init(request: &InitRequest<'_>, environment: &Environment) -> Result<InitReport> {
    let credential = credential(request.protection)?;
    let store = request.location.create_store()?;
    refuse_foreign_files(&*store)?;
    let new = holdfast_repo::InitRequest {
        credential,
        label: request.label,
        parameters: KdfParameters::default(),
        cipher: request.cipher,
    };
    let repository = match request.like {
        None => Repository::init(store, &new, environment.clone())?,
        Some(other) => Repository::init_like(store, &new, other, environment.clone())?,
    };
    let seen = match request.protection {
        NewProtection::Password(_) => Protection::Encrypted,
        NewProtection::Nothing => Protection::Open,
    };
    note_new(request.location, &repository, seen);
    let config = repository.config();
    Ok(InitReport {
        id: config.id,
        store: repository.describe(),
        cipher: config.cipher(),
        paper_key: PaperKey::encode(repository.master()),
    })
}

/// Checks that a repository could be created, and creates nothing. The parent directory must exist.
pub fn plan_init(request: &InitRequest<'_>) -> Result<()> {
    credential(request.protection)?;
    let path = request.location.path();
    if path.symlink_metadata().is_err() {
        let folder = folder_of(path);
        return if folder.is_dir() {
            check_folder(folder, path)
        } else {
            request.location.open_store().map(drop)
        };
    }
    let store = request.location.open_store()?;
    refuse_foreign_files(&*store)?;
    Repository::check_new(&*store)?;
    check_folder(path, path)
}

/// The credential for the first key slot.
fn credential(protection: NewProtection<'_>) -> Result<Credential<'_>> {
    match protection {
        NewProtection::Password(password) => {
            check_password(password)?;
            Ok(Credential::Password(password))
        }
        NewProtection::Nothing => Ok(Credential::Open),
    }
}

/// Refuses a directory with other files: a repository among them is easily deleted together with them.
fn refuse_foreign_files(store: &dyn Store) -> Result<()> {
    let mut first = None;
    store.foreign_files(&mut |path| {
        first.get_or_insert(path);
        Ok(())
    })?;
    match first {
        None => Ok(()),
        Some(stranger) => Err(Error::NotEmpty {
            store: store.describe(),
            stranger,
        }),
    }
}
