//! The memory of a suspended machine: a disk of the type `suspend`, and further data in the machine's record.
//!
//! Source: `suspend` and `resume` in `ocaml/xapi/xapi_xenops.ml`, and `ocaml/xapi/cpuid_helpers.ml`. A real hypervisor
//! writes a format of its own. Here the disk has a magic, a length, random bytes, and their checksum, which is also in
//! `last_booted_record`. So a machine can be resumed only from its own undamaged memory, and with the record that
//! belongs to it.

use serde_json::{Map, Value, json};
use twox_hash::XxHash64;

use super::Context;
use super::vdi::{new_vdi, remove as remove_vdi};
use crate::database::{NULL, new_uuid, text};
use crate::failure::{Answer, Failure};
use crate::pool::{Pool, State};

/// Size of the disk: much larger than the written data, as in XAPI.
const SUSPEND_BYTES: u64 = 4 << 20;
/// The magic at the start of an image.
const MAGIC: &[u8; 15] = b"XenSavedDomain\n";
/// Size of the memory data.
const PAYLOAD_BYTES: usize = 2_500_000;
/// Offset of the memory data, after the magic and the length.
const PAYLOAD_OFFSET: u64 = 23;
/// A range of pages that are not written.
const BLANK: std::ops::Range<usize> = 1_000_000..2_200_000;
/// The text before the checksum in `last_booted_record`.
const RECORD: &str = "xenopsd stand-in: memory ";

/// The processors of the pool, in the form that is stored in the record of a machine that was started on them.
pub(super) fn processors(state: &State) -> Value {
    let pool = state.database.all("pool").next();
    let vendor = pool.and_then(|(_, pool)| pool.get("cpu_info")?.get("vendor")?.as_str());
    json!({"vendor": vendor.unwrap_or_default(), "features": "1fcbfbff-f7fa3223-2d93fbff-00000523"})
}

/// Creates the disk with the memory of a machine, with the name `label`; returns it and the record that belongs to it.
pub(super) fn save(pool: &Pool, state: &mut State, label: &str) -> Answer<(String, String)> {
    let sr = state.shared_sr.clone();
    let fields = json!({"name_label": label, "type": "suspend", "name_description": "Suspend image"});
    let fields = fields.as_object().cloned().unwrap_or_default();
    let vdi = new_vdi(pool, state, &sr, SUSPEND_BYTES, &fields)?;
    let payload = payload(&new_uuid());
    let disk = state.disk_mut(&vdi)?;
    disk.write(0, MAGIC)?;
    disk.write(MAGIC.len() as u64, &(payload.len() as u64).to_le_bytes())?;
    disk.write(PAYLOAD_OFFSET, &payload)?;
    Ok((vdi, record_of(&payload)))
}

fn payload(seed: &str) -> Vec<u8> {
    let mut number = XxHash64::oneshot(0, seed.as_bytes());
    let mut payload = Vec::with_capacity(PAYLOAD_BYTES + 8);
    while payload.len() < PAYLOAD_BYTES {
        number = XxHash64::oneshot(number, &number.to_le_bytes());
        payload.extend(number.to_le_bytes());
    }
    payload.truncate(PAYLOAD_BYTES);
    payload[BLANK].fill(0);
    payload
}

fn record_of(payload: &[u8]) -> String {
    format!("{RECORD}{:016x}", XxHash64::oneshot(0, payload))
}

/// `VM.suspend`: creates a disk with the machine's memory.
pub(super) fn suspend(context: &mut Context<'_>, vm: &str) -> Answer<()> {
    let (vdi, record) = save(context.pool, context.state, "Suspend image")?;
    context.state.database.change("VM", vm, |machine| {
        machine.insert("suspend_VDI".to_owned(), json!(vdi));
        machine.insert("last_booted_record".to_owned(), json!(record));
    })
}

/// `VM.resume`: reads the memory of a machine, and removes its disk.
pub(super) fn resume(context: &mut Context<'_>, vm: &str) -> Answer<()> {
    let record = context.state.database.get("VM", vm)?.clone();
    let vdi = text(&record, "suspend_VDI");
    if vdi == NULL {
        super::vm::set_power_state(context.state, vm, "Halted")?;
        return Err(Failure::new("VM_HAS_NO_SUSPEND_VDI", &["VM", vm]));
    }
    let failed = |what: &str| Failure::internal(format!("xenopsd: cannot restore the domain: {what}"));
    let file = context.state.disk(vdi)?.file()?;
    let read = |offset: u64, length: usize| {
        let mut bytes = vec![0; length];
        std::os::unix::fs::FileExt::read_exact_at(&*file, &mut bytes, offset).map(|()| bytes)
    };
    if read(0, MAGIC.len())? != MAGIC {
        return Err(failed("the image does not begin like one"));
    }
    let length = read(MAGIC.len() as u64, 8)?.try_into().map(u64::from_le_bytes);
    let length = length.ok().and_then(|length| usize::try_from(length).ok());
    let length = length.filter(|length| (*length as u64) < SUSPEND_BYTES);
    let payload = read(PAYLOAD_OFFSET, length.ok_or_else(|| failed("the image has no length"))?)?;
    if record_of(&payload) != text(&record, "last_booted_record") {
        return Err(failed("its memory is not what last_booted_record says"));
    }
    context.state.database.set("VM", vm, "suspend_VDI", json!(NULL))?;
    remove_vdi(context.state, vdi)
}

/// Refuses to resume a machine on processors of another vendor than it was started on.
pub(super) fn refuse_other_processors(context: &Context<'_>, vm: &str) -> Answer<()> {
    let record = context.state.database.get("VM", vm)?;
    let vendor_of = |flags: &Map<String, Value>| flags.get("vendor").and_then(Value::as_str).map(str::to_owned);
    let then = record
        .get("last_boot_CPU_flags")
        .and_then(Value::as_object)
        .and_then(vendor_of);
    let now = processors(context.state).as_object().and_then(vendor_of);
    match then {
        Some(then) if Some(&then) != now.as_ref() => {
            let host = &context.state.hosts[context.state.master];
            let why = "VM last booted on a host which had a CPU from a different vendor.";
            Err(Failure::new("VM_INCOMPATIBLE_WITH_THIS_HOST", &[vm, host, why]))
        }
        _ => Ok(()),
    }
}
