//! How the C library's allocator keeps memory that was freed.
#![expect(
    unsafe_code,
    reason = "a function of the C library; its contract stands beside the call"
)]

/// From this size on, a buffer is a mapping of its own, which goes back to the system when it is freed.
#[cfg(target_env = "gnu")]
const MAPPED_BYTES_MIN: libc::c_int = 1 << 20;

/// Gives large buffers back to the system when they are freed.
///
/// glibc raises its threshold for mappings to the largest buffer that was ever freed. The memory of a key derivation (32 MiB) would raise it
/// above all others, and frames would fragment the heaps of several threads: up to 35 MiB more in a backup.
///
/// Call it before there are other threads.
pub fn map_large_buffers() {
    #[cfg(target_env = "gnu")]
    // SAFETY: it takes no pointers, and no other thread allocates yet. Where it fails, the default stays.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, MAPPED_BYTES_MIN);
    }
}
