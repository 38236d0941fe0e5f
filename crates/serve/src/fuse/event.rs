//! What a server of files reports.

/// Receives errors of a mounted file system. The program that reads a file sees only an error number.
pub trait MountEvents: Send + Sync {
    /// A file could not be opened.
    fn open_failed(&self, file: &str, error: &std::io::Error);

    /// A read failed.
    fn read_failed(&self, file: &str, error: &holdfast_block::Error);
}
