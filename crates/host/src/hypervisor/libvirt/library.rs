//! libvirt's libraries, loaded when the first connection is opened.
//!
//! A program that is linked with libvirt loads some fifty libraries at each start. This takes longer than most
//! commands, and the program does not start if a library is missing. So every libvirt function that this program
//! calls is defined here, with its name and its type in `virt::sys`. The linker resolves the calls to these
//! definitions, and omits the libraries. Each definition looks up the real function at its first call.
//! `-Wl,--as-needed` is the default of rustc.
//!
//! If the program calls a function that is not defined here, it is linked with libvirt as usual. A test of the
//! program detects this.

#![expect(unsafe_code, reason = "foreign functions: what they are called with is passed on")]

use std::ffi::{c_char, c_int, c_uint, c_ulong, c_ulonglong, c_void};
use std::ptr;
use std::sync::OnceLock;

use libloading::Library;
use virt::sys::{
    virConnectPtr, virDomainBlockInfoPtr, virDomainBlockJobInfoPtr, virDomainCheckpointPtr, virDomainPtr,
    virDomainSnapshotPtr, virErrorFunc, virErrorPtr, virNetworkPtr, virSecretPtr, virStoragePoolPtr,
    virTypedParameterPtr,
};

const MAIN: &str = "libvirt.so.0";
const QEMU: &str = "libvirt-qemu.so.0";

#[derive(Clone, Copy)]
enum Part {
    /// Every function except those for QEMU only.
    Main,
    Qemu,
}

type Loaded = Result<Library, libloading::Error>;

fn library(part: Part) -> &'static Loaded {
    static LOADED_MAIN: OnceLock<Loaded> = OnceLock::new();
    static LOADED_QEMU: OnceLock<Loaded> = OnceLock::new();
    let (loaded, name) = match part {
        Part::Main => (&LOADED_MAIN, MAIN),
        Part::Qemu => (&LOADED_QEMU, QEMU),
    };
    // SAFETY: initialising libvirt's libraries has no other condition than that these are their names. They are never
    // unloaded.
    loaded.get_or_init(|| unsafe { Library::new(name) })
}

/// Loads the library that all connections need. Returns why it cannot be loaded.
pub(super) fn load() -> Result<(), &'static libloading::Error> {
    library(Part::Main).as_ref().map(drop)
}

/// Looks up a function; none if the library or the function is missing, as in an old release of libvirt.
///
/// # Safety
/// `F` is the type of the function with this name.
unsafe fn find<F: Copy>(part: Part, name: &str) -> Option<F> {
    let library = library(part).as_ref().ok()?;
    // SAFETY: the caller guarantees the type.
    let symbol = unsafe { library.get::<F>(name.as_bytes()) };
    symbol.ok().map(|symbol| *symbol)
}

macro_rules! forwarded {
    ($($part:ident: fn $name:ident($($argument:ident: $kind:ty),*) $(-> $result:ty)?, or $failure:expr;)*) => {$(
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name($($argument: $kind),*) $(-> $result)? {
            type Function = unsafe extern "C" fn($($kind),*) $(-> $result)?;
            static FUNCTION: OnceLock<Option<Function>> = OnceLock::new();
            // SAFETY: the type is that of the declaration in `virt::sys`, which is made from libvirt's header.
            let found = *FUNCTION.get_or_init(|| unsafe { find(Part::$part, stringify!($name)) });
            match found {
                // SAFETY: the caller keeps the contract of the function, which is that of this one.
                Some(function) => unsafe { function($($argument),*) },
                None => $failure,
            }
        }

        // A compile-time check of the type.
        const _: unsafe extern "C" fn($($kind),*) $(-> $result)? = virt::sys::$name;
    )*};
}

forwarded! {
    Main: fn virConnectClose(conn: virConnectPtr) -> c_int, or -1;
    Main: fn virConnectDomainXMLToNative(conn: virConnectPtr, native_format: *const c_char, domain_xml: *const c_char, flags: c_uint) -> *mut c_char, or ptr::null_mut();
    Main: fn virConnectGetCapabilities(conn: virConnectPtr) -> *mut c_char, or ptr::null_mut();
    Main: fn virConnectGetLibVersion(conn: virConnectPtr, lib_ver: *mut c_ulong) -> c_int, or -1;
    Main: fn virConnectGetURI(conn: virConnectPtr) -> *mut c_char, or ptr::null_mut();
    Main: fn virConnectListAllDomains(conn: virConnectPtr, domains: *mut *mut virDomainPtr, flags: c_uint) -> c_int, or -1;
    Main: fn virConnectOpen(name: *const c_char) -> virConnectPtr, or ptr::null_mut();
    Main: fn virConnectRef(conn: virConnectPtr) -> c_int, or -1;
    Main: fn virConnectCompareCPU(conn: virConnectPtr, xml_desc: *const c_char, flags: c_uint) -> c_int, or -1;
    Main: fn virDomainBlockCommit(dom: virDomainPtr, disk: *const c_char, base: *const c_char, top: *const c_char, bandwidth: c_ulong, flags: c_uint) -> c_int, or -1;
    Main: fn virDomainBlockCopy(dom: virDomainPtr, disk: *const c_char, destxml: *const c_char, params: virTypedParameterPtr, nparams: c_int, flags: c_uint) -> c_int, or -1;
    Main: fn virDomainBlockJobAbort(dom: virDomainPtr, disk: *const c_char, flags: c_uint) -> c_int, or -1;
    Main: fn virDomainBlockJobSetSpeed(dom: virDomainPtr, disk: *const c_char, bandwidth: c_ulong, flags: c_uint) -> c_int, or -1;
    Main: fn virDomainBlockPull(dom: virDomainPtr, disk: *const c_char, bandwidth: c_ulong, flags: c_uint) -> c_int, or -1;
    Main: fn virDomainCheckpointCreateXML(domain: virDomainPtr, xml_desc: *const c_char, flags: c_uint) -> virDomainCheckpointPtr, or ptr::null_mut();
    Main: fn virDomainCheckpointDelete(checkpoint: virDomainCheckpointPtr, flags: c_uint) -> c_int, or -1;
    Main: fn virDomainCheckpointFree(checkpoint: virDomainCheckpointPtr) -> c_int, or -1;
    Main: fn virDomainCheckpointGetXMLDesc(checkpoint: virDomainCheckpointPtr, flags: c_uint) -> *mut c_char, or ptr::null_mut();
    Main: fn virDomainCreate(domain: virDomainPtr) -> c_int, or -1;
    Main: fn virDomainDefineXML(conn: virConnectPtr, xml: *const c_char) -> virDomainPtr, or ptr::null_mut();
    Main: fn virDomainDestroy(domain: virDomainPtr) -> c_int, or -1;
    Main: fn virDomainFree(domain: virDomainPtr) -> c_int, or -1;
    Main: fn virDomainGetAutostart(domain: virDomainPtr, autostart: *mut c_int) -> c_int, or -1;
    Main: fn virDomainGetBlockInfo(dom: virDomainPtr, disk: *const c_char, info: virDomainBlockInfoPtr, flags: c_uint) -> c_int, or -1;
    Main: fn virDomainGetBlockJobInfo(dom: virDomainPtr, disk: *const c_char, info: virDomainBlockJobInfoPtr, flags: c_uint) -> c_int, or -1;
    Main: fn virDomainGetName(domain: virDomainPtr) -> *const c_char, or ptr::null();
    Main: fn virDomainGetState(domain: virDomainPtr, state: *mut c_int, reason: *mut c_int, flags: c_uint) -> c_int, or -1;
    Main: fn virDomainGetUUIDString(domain: virDomainPtr, buf: *mut c_char) -> c_int, or -1;
    Main: fn virDomainGetXMLDesc(domain: virDomainPtr, flags: c_uint) -> *mut c_char, or ptr::null_mut();
    Main: fn virDomainHasManagedSaveImage(dom: virDomainPtr, flags: c_uint) -> c_int, or -1;
    Main: fn virDomainIsActive(dom: virDomainPtr) -> c_int, or -1;
    Main: fn virDomainIsPersistent(dom: virDomainPtr) -> c_int, or -1;
    Main: fn virDomainListAllCheckpoints(domain: virDomainPtr, checkpoints: *mut *mut virDomainCheckpointPtr, flags: c_uint) -> c_int, or -1;
    Main: fn virDomainListAllSnapshots(domain: virDomainPtr, snaps: *mut *mut virDomainSnapshotPtr, flags: c_uint) -> c_int, or -1;
    Main: fn virDomainLookupByName(conn: virConnectPtr, name: *const c_char) -> virDomainPtr, or ptr::null_mut();
    Main: fn virDomainLookupByUUIDString(conn: virConnectPtr, uuid: *const c_char) -> virDomainPtr, or ptr::null_mut();
    Qemu: fn virDomainQemuAgentCommand(domain: virDomainPtr, cmd: *const c_char, timeout: c_int, flags: c_uint) -> *mut c_char, or ptr::null_mut();
    Qemu: fn virDomainQemuMonitorCommand(domain: virDomainPtr, cmd: *const c_char, result: *mut *mut c_char, flags: c_uint) -> c_int, or -1;
    Qemu: fn virDomainQemuMonitorCommandWithFiles(domain: virDomainPtr, cmd: *const c_char, ninfiles: c_uint, infiles: *mut c_int, noutfiles: *mut c_uint, outfiles: *mut *mut c_int, result: *mut *mut c_char, flags: c_uint) -> c_int, or -1;
    Main: fn virDomainMigrateSetMaxDowntime(domain: virDomainPtr, downtime: c_ulonglong, flags: c_uint) -> c_int, or -1;
    Main: fn virDomainMigrateToURI3(domain: virDomainPtr, dconnuri: *const c_char, params: virTypedParameterPtr, nparams: c_uint, flags: c_uint) -> c_int, or -1;
    Main: fn virDomainRef(domain: virDomainPtr) -> c_int, or -1;
    Main: fn virDomainRestoreFlags(conn: virConnectPtr, from: *const c_char, dxml: *const c_char, flags: c_uint) -> c_int, or -1;
    Main: fn virDomainResume(domain: virDomainPtr) -> c_int, or -1;
    Main: fn virDomainSetAutostart(domain: virDomainPtr, autostart: c_int) -> c_int, or -1;
    Main: fn virDomainSnapshotCreateXML(domain: virDomainPtr, xml_desc: *const c_char, flags: c_uint) -> virDomainSnapshotPtr, or ptr::null_mut();
    Main: fn virDomainSnapshotDelete(snapshot: virDomainSnapshotPtr, flags: c_uint) -> c_int, or -1;
    Main: fn virDomainSnapshotFree(snapshot: virDomainSnapshotPtr) -> c_int, or -1;
    Main: fn virDomainSnapshotGetXMLDesc(snapshot: virDomainSnapshotPtr, flags: c_uint) -> *mut c_char, or ptr::null_mut();
    Main: fn virDomainSnapshotIsCurrent(snapshot: virDomainSnapshotPtr, flags: c_uint) -> c_int, or -1;
    Main: fn virDomainSnapshotNum(domain: virDomainPtr, flags: c_uint) -> c_int, or -1;
    Main: fn virDomainUndefineFlags(domain: virDomainPtr, flags: c_uint) -> c_int, or -1;
    Main: fn virGetLastError() -> virErrorPtr, or ptr::null_mut();
    Main: fn virNetworkFree(network: virNetworkPtr) -> c_int, or -1;
    Main: fn virNetworkIsActive(net: virNetworkPtr) -> c_int, or -1;
    Main: fn virNetworkLookupByName(conn: virConnectPtr, name: *const c_char) -> virNetworkPtr, or ptr::null_mut();
    Main: fn virSecretFree(secret: virSecretPtr) -> c_int, or -1;
    Main: fn virSecretLookupByUUIDString(conn: virConnectPtr, uuid: *const c_char) -> virSecretPtr, or ptr::null_mut();
    Main: fn virSetErrorFunc(user_data: *mut c_void, handler: virErrorFunc), or ();
    Main: fn virStoragePoolFree(pool: virStoragePoolPtr) -> c_int, or -1;
    Main: fn virStoragePoolGetXMLDesc(pool: virStoragePoolPtr, flags: c_uint) -> *mut c_char, or ptr::null_mut();
    Main: fn virStoragePoolIsActive(pool: virStoragePoolPtr) -> c_int, or -1;
    Main: fn virStoragePoolLookupByName(conn: virConnectPtr, name: *const c_char) -> virStoragePoolPtr, or ptr::null_mut();
}
