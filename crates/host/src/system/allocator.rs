//! How the C library's allocator returns freed memory to the operating system.
#![expect(
    unsafe_code,
    reason = "a function of the C library; its contract stands beside the call"
)]

/// Buffers of at least this size are separate mappings, which are returned to the system when they are freed.
#[cfg(target_env = "gnu")]
const MAPPED_BYTES_MIN: libc::c_int = 1 << 20;

/// A server keeps freed buffers up to this size: the largest request that it executes at once.
#[cfg(target_env = "gnu")]
const KEPT_BYTES_MAX: libc::c_int = 4 << 20;
/// Freed memory at the end of a heap that a server keeps.
#[cfg(target_env = "gnu")]
const KEPT_HEAP_BYTES: libc::c_int = 64 << 20;

/// Makes the allocator keep freed buffers of requests for the next ones.
///
/// A mapping is zeroed by the system page by page when it is used: this took half of the time of a write of 1 MiB. The
/// memory of a server is bounded by what its requests need at the same time.
pub fn keep_request_buffers() {
    #[cfg(target_env = "gnu")]
    // SAFETY: the calls take no pointers, and lock the allocator. Threads that allocate meanwhile use the old or the new
    // value.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, KEPT_BYTES_MAX);
        libc::mallopt(libc::M_TRIM_THRESHOLD, KEPT_HEAP_BYTES);
    }
}

/// Makes the allocator return large buffers to the operating system when they are freed.
///
/// glibc raises its threshold for mappings to the size of the largest buffer that was ever freed. The memory of a key
/// derivation (32 MiB) would raise it above all other buffers, and frames would fragment the heaps of several
/// threads. This would cost up to 35 MiB more in a backup.
///
/// Must be called before other threads exist.
pub fn map_large_buffers() {
    #[cfg(target_env = "gnu")]
    // SAFETY: the call takes no pointers, and no other thread allocates yet. If it fails, the default is kept.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, MAPPED_BYTES_MIN);
    }
}
