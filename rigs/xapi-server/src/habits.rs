//! Legitimate differences between pools and their versions.

/// The kind of checksum after each block of an XVA.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Checksum {
    /// XXH64 as sixteen upper-case hexadecimal digits, in a member `.xxhash`: written by xapi since 2019.
    #[default]
    Xxhash,
    /// SHA-1 as lower-case hexadecimal digits, in a member `.checksum`: written by earlier versions of xapi.
    Sha1,
}

/// The bitmaps of the blocks of a differencing VHD.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum VhdBitmaps {
    /// All sectors are marked as present: written by xapi's vhd-tool, which completes each block from the chain.
    #[default]
    Full,
    /// Only the changed sectors are marked, as by other writers of VHD; the rest of the block is noise, which must not
    /// be read.
    Changed,
}

/// The order of the blocks of a VHD in the stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum VhdOrder {
    /// By block number, as written by xapi's vhd-tool.
    #[default]
    Sorted,
    /// Backwards.
    Reversed,
}

/// The purpose of the pool's network.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum NbdPurpose {
    /// NBD with TLS: the purpose `nbd`.
    #[default]
    Nbd,
    /// NBD without TLS: the purpose `insecure_nbd`. This server requires TLS nevertheless.
    InsecureNbd,
    /// No NBD: `VDI.get_nbd_info` returns an empty list.
    None,
}

/// The behaviour of this pool where pools differ.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Habits {
    /// The kind of checksum after each block of an XVA.
    pub checksum: Checksum,
    /// An empty block is sent after this many blocks of an XVA, as xapi does to keep a slow connection open; 0 for
    /// none.
    pub keep_alive_every: u64,
    /// Whether zero blocks of an XVA are left out, except for the first and the last one.
    pub skips_zero_blocks: bool,
    /// The bitmaps of differencing VHDs.
    pub vhd_bitmaps: VhdBitmaps,
    /// The order of the blocks of VHDs.
    pub vhd_order: VhdOrder,
    /// The number of polls for which a task of an `Async.` call is pending.
    pub pending_polls: u32,
    /// Whether `VM.snapshot` has the third argument `ignore_vdis`.
    pub has_ignore_vdis: bool,
    /// The status with which `Transfer-Encoding: chunked` is refused for a disk: 403 in older versions, 404 in newer
    /// ones.
    pub chunked_status: u16,
    /// The number of bytes that a transfer moves at a time.
    pub piece_bytes: usize,
    /// Whether a firewall blocks the NBD port: the pool then reports a port without a server.
    pub has_closed_nbd: bool,
}

impl Default for Habits {
    fn default() -> Self {
        Self {
            checksum: Checksum::default(),
            keep_alive_every: 0,
            skips_zero_blocks: true,
            vhd_bitmaps: VhdBitmaps::default(),
            vhd_order: VhdOrder::default(),
            pending_polls: 1,
            has_ignore_vdis: true,
            chunked_status: 403,
            piece_bytes: 256 << 10,
            has_closed_nbd: false,
        }
    }
}
