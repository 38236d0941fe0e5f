//! What a server of files reports.

/// Receives errors of a mounted file system. The program that uses a file sees only an error number.
pub trait MountEvents: Send + Sync {
    /// A file could not be opened.
    fn open_failed(&self, file: &str, error: &std::io::Error);

    /// A read, a write or a flush failed.
    fn request_failed(&self, file: &str, error: &holdfast_block::Error);
}
