//! How pools differ, of one version or another, without anything being wrong.

/// Which checksum follows each block of an XVA.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Checksum {
    /// XXH64 in sixteen upper-case hexadecimal digits, in a member `.xxhash`: what xapi writes since 2019.
    #[default]
    Xxhash,
    /// SHA-1 in lower-case hexadecimal digits, in a member `.checksum`: what xapi wrote before.
    Sha1,
}

/// What the bitmaps of the blocks of a differencing VHD say.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum VhdBitmaps {
    /// That all sectors are in the block: what xapi's vhd-tool writes, which fills each block up from the chain.
    #[default]
    Full,
    /// Only the sectors that changed: what other writers of VHD do; the rest of the block holds noise, which must not be read.
    Changed,
}

/// In which order the blocks of a VHD lie in the stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum VhdOrder {
    /// By the number of the block: what xapi's vhd-tool writes.
    #[default]
    Sorted,
    /// Backwards.
    Reversed,
}

/// For what the network of the pool may be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum NbdPurpose {
    /// NBD under TLS: the purpose `nbd`.
    #[default]
    Nbd,
    /// NBD in the clear: the purpose `insecure_nbd`. The server here requires TLS nevertheless.
    InsecureNbd,
    /// No NBD: `VDI.get_nbd_info` gives nothing.
    None,
}

/// How this pool does what pools do differently.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Habits {
    /// What follows each block of an XVA.
    pub checksum: Checksum,
    /// The number of blocks of an XVA between empty ones, which xapi sends to keep a slow connection open; 0 for none.
    pub keep_alive_every: u64,
    /// Whether blocks of an XVA that are zero are left out, but for the first and the last.
    pub skips_zero_blocks: bool,
    /// What bitmaps of differencing VHDs say.
    pub vhd_bitmaps: VhdBitmaps,
    /// How blocks of VHDs are ordered.
    pub vhd_order: VhdOrder,
    /// How many looks at a task of an `Async.` call find it pending.
    pub pending_polls: u32,
    /// Whether `VM.snapshot` takes the third argument `ignore_vdis`.
    pub has_ignore_vdis: bool,
    /// How `Transfer-Encoding: chunked` is refused for a disk: 403 by older versions, 404 by newer ones.
    pub chunked_status: u16,
    /// Bytes that a transfer moves at once.
    pub piece_bytes: usize,
    /// Whether a firewall blocks the port of NBD: the pool names a port without a server.
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
