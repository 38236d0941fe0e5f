//! The object layer under a repository.
//!
//! A [`Store`] keeps immutable objects under names. It can put an object if its name is free, read it completely or in
//! part, list a kind, and delete. Directories, object storage and connections to other hosts can provide that, and it
//! suffices for a repository with many writers and no lock: the only conflict of two writers, which of them gets a
//! name, is decided by [`Store::put`].
//!
//! | | |
//! |---|---|
//! | [`DirectoryStore`] | a directory, local or mounted |
//! | [`MemoryStore`] | memory, for states that live as long as the process, and for tests |
//!
//! With the feature `testing` there are also stores that fail, crash, or interleave operations by a seed (`testing`),
//! and the tests that every store must pass (`conformance`).

mod directory;
mod error;
mod memory;
mod name;
#[cfg(any(test, feature = "testing"))]
mod testing;

use std::sync::Arc;
use std::time::Duration;

pub use directory::DirectoryStore;
pub use error::{Result, StoreError};
pub use memory::MemoryStore;
pub use name::{BadName, ObjectKind, ObjectName};
#[cfg(any(test, feature = "testing"))]
pub use testing::{
    conformance,
    fault::{Fault, FaultEffect, FaultPlan, FaultSpan, FaultStore},
    operation::Operation,
    scheduler::{InterleavedStore, Interleaver, Step},
};

/// The result of a put.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Put {
    /// The object did not exist and was created.
    Created,
    /// An object with this name existed; it is unchanged, and durable.
    AlreadyExists,
}

/// A storage of objects, used by any number of threads, processes and hosts concurrently.
///
/// Implementations must keep these promises; the repository depends on all of them:
///
/// - **Atomic.** An object is visible under its name with all its bytes, or not visible: to any reader, at any moment,
///   and after a crash at any moment. A crash may only leave behind space that gc frees, never an incomplete object
///   with a valid name.
/// - **First put wins.** Of all puts of one name, by any process, exactly one returns [`Put::Created`] as long as the
///   object is not deleted. An object never changes.
/// - **Durable.** When `put` or `commit` returns, including [`Put::AlreadyExists`], the object survives a power
///   failure. A deletion is durable when `delete` returns, except for packs, which may reappear.
/// - **Consistent.** A call sees everything that was put before it began, by any process: `get` after `put`, and `list`
///   after `put`. It does not see what was deleted before.
/// - **Errors are reliable.** An object that exists is never `NotFound`; an unreadable one causes an error and is
///   not omitted from a listing.
///
/// After an error of a call that changes something, the change may have happened or not.
pub trait Store: Send + Sync {
    /// Puts an object, if no object has its name.
    fn put(&self, name: &ObjectName, bytes: &[u8]) -> Result<Put>;

    /// Begins an object that is too large for memory; it is not visible before [`ObjectWriter::commit`].
    fn create(&self, name: &ObjectName) -> Result<Box<dyn ObjectWriter>>;

    /// All bytes of an object; more than `length_max` bytes are [`StoreError::TooLarge`].
    fn get(&self, name: &ObjectName, length_max: u64) -> Result<Vec<u8>>;

    /// Fills `buffer` with the bytes at `offset`; [`StoreError::ShortObject`] if the object is too short.
    fn get_range(&self, name: &ObjectName, offset: u64, buffer: &mut [u8]) -> Result<()>;

    /// The length of an object in bytes.
    fn length(&self, name: &ObjectName) -> Result<u64>;

    /// Calls `visit` with every object of a kind and its length in bytes, in no particular order.
    ///
    /// An object that exists during the whole call is visited exactly once; one that is put or deleted meanwhile may be
    /// visited or not. `visit` may use the store, also to delete the visited object; its first error ends the call.
    fn list(&self, kind: ObjectKind, visit: &mut dyn FnMut(ObjectName, u64) -> Result<()>) -> Result<()>;

    /// Calls `visit` with every object of a kind, like [`list`](Self::list), and its age, by the clock of the
    /// store.
    ///
    /// The clock of this host is not used: two hosts with different clocks see the same age, and an object with a time
    /// in the future has age zero. `None` if the store cannot report ages; then no writer is considered dead because
    /// of its age.
    fn ages(&self, kind: ObjectKind, visit: &mut dyn FnMut(ObjectName, Option<Duration>) -> Result<()>) -> Result<()> {
        self.list(kind, &mut |name, _| visit(name, None))
    }

    /// Deletes an object; it need not exist.
    fn delete(&self, name: &ObjectName) -> Result<()>;

    /// Calls `visit` with the path of everything in the store that is not an object and does not belong
    /// there.
    fn foreign_files(&self, visit: &mut dyn FnMut(String) -> Result<()>) -> Result<()>;

    /// Removes unfinished objects to which nothing was added for `age`; returns the number of bytes freed.
    ///
    /// A writer that continues such an object gets an error, and nothing is put.
    fn clean(&self, age: Duration) -> Result<u64>;

    /// Describes the store, for messages: "directory /backup/repo".
    fn describe(&self) -> String;

    /// The free space in bytes, if known.
    fn free_bytes(&self) -> Option<u64>;
}

/// An object that is being written; if it is dropped without [`commit`](ObjectWriter::commit), it never
/// becomes visible.
pub trait ObjectWriter: Send {
    /// Adds bytes at the end.
    ///
    /// After an error the object can only be dropped.
    fn append(&mut self, bytes: &[u8]) -> Result<()>;

    /// Makes the object visible, with the promises of [`Store::put`].
    fn commit(self: Box<Self>) -> Result<Put>;
}

macro_rules! forward_store {
    ($($pointer:ty),*) => {$(
        impl<T: Store + ?Sized> Store for $pointer {
            fn put(&self, name: &ObjectName, bytes: &[u8]) -> Result<Put> {
                (**self).put(name, bytes)
            }
            fn create(&self, name: &ObjectName) -> Result<Box<dyn ObjectWriter>> {
                (**self).create(name)
            }
            fn get(&self, name: &ObjectName, length_max: u64) -> Result<Vec<u8>> {
                (**self).get(name, length_max)
            }
            fn get_range(&self, name: &ObjectName, offset: u64, buffer: &mut [u8]) -> Result<()> {
                (**self).get_range(name, offset, buffer)
            }
            fn length(&self, name: &ObjectName) -> Result<u64> {
                (**self).length(name)
            }
            fn list(&self, kind: ObjectKind, visit: &mut dyn FnMut(ObjectName, u64) -> Result<()>) -> Result<()> {
                (**self).list(kind, visit)
            }
            fn ages(
                &self,
                kind: ObjectKind,
                visit: &mut dyn FnMut(ObjectName, Option<Duration>) -> Result<()>,
            ) -> Result<()> {
                (**self).ages(kind, visit)
            }
            fn delete(&self, name: &ObjectName) -> Result<()> {
                (**self).delete(name)
            }
            fn foreign_files(&self, visit: &mut dyn FnMut(String) -> Result<()>) -> Result<()> {
                (**self).foreign_files(visit)
            }
            fn clean(&self, age: Duration) -> Result<u64> {
                (**self).clean(age)
            }
            fn describe(&self) -> String {
                (**self).describe()
            }
            fn free_bytes(&self) -> Option<u64> {
                (**self).free_bytes()
            }
        }
    )*};
}

forward_store!(&T, Box<T>, Arc<T>);
