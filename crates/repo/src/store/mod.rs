//! The object layer under a repository.
//!
//! A [`Store`] keeps immutable objects under names. It can put an object if its name is free, read it whole or in part,
//! list a kind, and delete. Directories, object storage and connections to other hosts can provide that, and it
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

/// What became of a put.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Put {
    /// The object did not exist; it does now.
    Created,
    /// There was an object of that name; it is unchanged, and durable.
    AlreadyExists,
}

/// A place that keeps objects, used by any number of threads, processes and hosts at once.
///
/// Implementers must keep these promises; the repository above rests on every one of them:
///
/// - **Whole or not at all.** An object is visible under its name with all its bytes, or not visible: to any reader, at any
///   moment, and after a crash at any moment. All that a crash may leave behind is space that gc gives back, never a
///   thing with the name of an object.
/// - **First come.** Of all puts of one name, by whomever, exactly one answers [`Put::Created`] as long as the object is not
///   deleted. An object never changes.
/// - **Durable.** When `put` or `commit` answers, [`Put::AlreadyExists`] included, the object survives a power cut. A
///   deletion does so when `delete` answers, but for packs, which may come back.
/// - **Consistent.** What was put before a call began, by anyone, is seen by it: `get` after `put`, and `list` after `put`. What
///   was deleted before is not seen.
/// - **Errors are honest.** An object that exists is never `NotFound`; one that cannot be read is an error and not
///   left out of a list.
///
/// After an error of a call that changes something, the change has happened or it has not.
pub trait Store: Send + Sync {
    /// Puts an object, if there is none of that name.
    fn put(&self, name: &ObjectName, bytes: &[u8]) -> Result<Put>;

    /// Begins an object that is too large for memory; it is not visible before [`ObjectWriter::commit`].
    fn create(&self, name: &ObjectName) -> Result<Box<dyn ObjectWriter>>;

    /// All bytes of an object; one that has more than `length_max` is [`StoreError::TooLarge`].
    fn get(&self, name: &ObjectName, length_max: u64) -> Result<Vec<u8>>;

    /// Fills `buffer` with the bytes at `offset`; [`StoreError::ShortObject`] when the object ends before.
    fn get_range(&self, name: &ObjectName, offset: u64, buffer: &mut [u8]) -> Result<()>;

    /// Bytes of an object.
    fn length(&self, name: &ObjectName) -> Result<u64>;

    /// Calls `visit` with every object of a kind and its length in bytes, in no order.
    ///
    /// An object that exists during the whole call comes exactly once; one that is put or deleted meanwhile may come or not.
    /// `visit` may use the store, also to delete what it is given; its first error ends the call.
    fn list(&self, kind: ObjectKind, visit: &mut dyn FnMut(ObjectName, u64) -> Result<()>) -> Result<()>;

    /// Calls `visit` with every object of a kind, as [`list`](Self::list), and its age, by the clock of the store.
    ///
    /// The clock of this host does not count: two hosts with different clocks see the same age, and an object in the
    /// future has age zero. None if the store cannot report ages; then no writer is considered dead because of an age.
    fn ages(&self, kind: ObjectKind, visit: &mut dyn FnMut(ObjectName, Option<Duration>) -> Result<()>) -> Result<()> {
        self.list(kind, &mut |name, _| visit(name, None))
    }

    /// Deletes an object; one that does not exist is fine.
    fn delete(&self, name: &ObjectName) -> Result<()>;

    /// Calls `visit` with the path of everything in the store that is no object and has no business there.
    fn foreign_files(&self, visit: &mut dyn FnMut(String) -> Result<()>) -> Result<()>;

    /// Removes unfinished objects to which nothing was added for `age`; returns the number of bytes freed.
    ///
    /// A writer that continues such an object gets an error, and nothing is put.
    fn clean(&self, age: Duration) -> Result<u64>;

    /// Says which store this is, for messages: "directory /backup/repo".
    fn describe(&self) -> String;

    /// Bytes that can still be put, where the store knows.
    fn free_bytes(&self) -> Option<u64>;
}

/// An object on its way into a store; dropped without [`commit`](ObjectWriter::commit), it was never there.
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
