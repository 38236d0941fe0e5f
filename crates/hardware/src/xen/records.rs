//! Builds records of XenServer, with all fields that XAPI requires.

use super::value::Value;
use crate::xen::write_options::{NULL, XenOptions};
use crate::{Clock, Disk, DiskKind, Firmware, Machine, NetworkCard};

/// Fields with an empty text.
const TEXTS: &[&str] = &[
    "PV_kernel",
    "PV_ramdisk",
    "PV_args",
    "PV_bootloader_args",
    "PV_legacy_args",
    "PCI_bus",
    "recommendations",
    "domarch",
    "last_booted_record",
    "ha_restart_priority",
    "transportable_snapshot_id",
    "snapshot_metadata",
    "generation_id",
    "reference_label",
];
/// Fields with an empty list.
const LISTS: &[&str] = &[
    "allowed_operations",
    "consoles",
    "VUSBs",
    "crash_dumps",
    "VTPMs",
    "tags",
    "snapshots",
    "children",
    "VGPUs",
    "attached_PCIs",
];
/// Fields with an empty map.
const MAPS: &[&str] = &[
    "current_operations",
    "last_boot_CPU_flags",
    "xenstore_data",
    "blobs",
    "blocked_operations",
    "snapshot_info",
    "bios_strings",
    "NVRAM",
];
/// Fields with a null reference.
const REFERENCES: &[&str] = &[
    "suspend_VDI",
    "suspend_SR",
    "resident_on",
    "scheduled_to_be_resident_on",
    "affinity",
    "metrics",
    "guest_metrics",
    "snapshot_of",
    "parent",
    "protection_policy",
    "snapshot_schedule",
    "appliance",
];

/// The storage repository of the disks.
pub(super) fn storage_record(vdis: Vec<Value>, options: &mut XenOptions<'_>) -> Value {
    structure([
        ("uuid", Value::text((options.new_uuid)())),
        ("name_label", Value::text("Imported")),
        ("name_description", Value::text("")),
        ("allowed_operations", none()),
        ("current_operations", empty()),
        ("VDIs", Value::Array(vdis)),
        ("PBDs", none()),
        ("virtual_allocation", Value::text("0")),
        ("physical_utilisation", Value::text("0")),
        ("physical_size", Value::text("0")),
        ("type", Value::text("ext")),
        ("content_type", Value::text("user")),
        ("shared", Value::Bool(false)),
        ("other_config", empty()),
        ("tags", none()),
        ("sm_config", empty()),
        ("blobs", empty()),
        ("local_cache_enabled", Value::Bool(false)),
        ("introduced_by", Value::text(NULL)),
        ("clustered", Value::Bool(false)),
        ("is_tools_sr", Value::Bool(false)),
    ])
}

/// The network of the cards.
pub(super) fn network_record(name: &str, vifs: Vec<Value>, options: &mut XenOptions<'_>) -> Value {
    structure([
        ("uuid", Value::text((options.new_uuid)())),
        ("name_label", Value::text(name)),
        ("name_description", Value::text("")),
        ("allowed_operations", none()),
        ("current_operations", empty()),
        ("VIFs", Value::Array(vifs)),
        ("PIFs", none()),
        ("MTU", Value::text("1500")),
        ("other_config", empty()),
        ("bridge", Value::text("xenbr0")),
        ("managed", Value::Bool(true)),
        ("blobs", empty()),
        ("tags", none()),
        ("default_locking_mode", Value::text("unlocked")),
        ("assigned_ips", empty()),
        ("purpose", none()),
    ])
}

pub(super) fn structure<const N: usize>(members: [(&str, Value); N]) -> Value {
    Value::Struct(members.map(|(name, value)| (name.to_owned(), value)).into())
}

pub(super) fn none() -> Value {
    Value::Array(Vec::new())
}

pub(super) fn empty() -> Value {
    Value::Struct(Vec::new())
}

fn epoch() -> Value {
    Value::Time("19700101T00:00:00Z".to_owned())
}

pub(super) fn vbd_record(disk: &Disk, place: u32, vm: &str, vdi: &str, options: &mut XenOptions<'_>) -> Value {
    structure([
        ("uuid", Value::text((options.new_uuid)())),
        ("allowed_operations", none()),
        ("current_operations", empty()),
        ("VM", Value::text(vm)),
        ("VDI", Value::text(vdi)),
        ("device", Value::text("")),
        ("userdevice", Value::text(place.to_string())),
        (
            "bootable",
            Value::Bool(disk.kind == DiskKind::Disk && disk.boot_order.is_some()),
        ),
        (
            "mode",
            Value::text(if disk.is_read_only || disk.kind == DiskKind::Cdrom {
                "RO"
            } else {
                "RW"
            }),
        ),
        (
            "type",
            Value::text(if disk.kind == DiskKind::Cdrom { "CD" } else { "Disk" }),
        ),
        ("unpluggable", Value::Bool(disk.kind != DiskKind::Cdrom)),
        ("storage_lock", Value::Bool(false)),
        ("empty", Value::Bool(vdi == NULL)),
        ("other_config", structure([("owner", Value::text(""))])),
        ("currently_attached", Value::Bool(false)),
        ("status_code", Value::text("0")),
        ("status_detail", Value::text("")),
        ("runtime_properties", empty()),
        ("qos_algorithm_type", Value::text("")),
        ("qos_algorithm_params", empty()),
        ("qos_supported_algorithms", none()),
        ("metrics", Value::text(NULL)),
    ])
}

pub(super) fn vdi_record(disk: &Disk, storage: &str, vbd: &str, options: &mut XenOptions<'_>) -> Value {
    let size = disk.size_bytes.unwrap_or_default().to_string();
    let label = if disk.label.is_empty() { &disk.key } else { &disk.label };
    let uuid = (options.new_uuid)();
    structure([
        ("uuid", Value::text(uuid.as_str())),
        ("name_label", Value::text(label.as_str())),
        ("name_description", Value::text("")),
        ("allowed_operations", none()),
        ("current_operations", empty()),
        ("SR", Value::text(storage)),
        ("VBDs", Value::Array(vec![Value::text(vbd)])),
        ("crash_dumps", none()),
        ("virtual_size", Value::text(size.as_str())),
        ("physical_utilisation", Value::text(size)),
        ("type", Value::text("user")),
        ("sharable", Value::Bool(false)),
        ("read_only", Value::Bool(disk.is_read_only)),
        ("other_config", empty()),
        ("storage_lock", Value::Bool(false)),
        ("location", Value::text(uuid)),
        ("managed", Value::Bool(true)),
        ("missing", Value::Bool(false)),
        ("parent", Value::text(NULL)),
        ("xenstore_data", empty()),
        ("sm_config", empty()),
        ("is_a_snapshot", Value::Bool(false)),
        ("snapshot_of", Value::text(NULL)),
        ("snapshots", none()),
        ("snapshot_time", epoch()),
        ("tags", none()),
        ("allow_caching", Value::Bool(false)),
        ("on_boot", Value::text("persist")),
        ("metadata_of_pool", Value::text(NULL)),
        ("metadata_latest", Value::Bool(false)),
        ("is_tools_iso", Value::Bool(false)),
        ("cbt_enabled", Value::Bool(false)),
    ])
}

pub(super) fn vif_record(
    card: &NetworkCard,
    number: usize,
    vm: &str,
    network: &str,
    options: &mut XenOptions<'_>,
) -> Value {
    structure([
        ("uuid", Value::text((options.new_uuid)())),
        ("allowed_operations", none()),
        ("current_operations", empty()),
        ("device", Value::text(number.to_string())),
        ("network", Value::text(network)),
        ("VM", Value::text(vm)),
        ("MAC", Value::text(card.mac.clone().unwrap_or_default())),
        ("MTU", Value::text("1500")),
        ("other_config", empty()),
        ("currently_attached", Value::Bool(false)),
        ("status_code", Value::text("0")),
        ("status_detail", Value::text("")),
        ("runtime_properties", empty()),
        ("qos_algorithm_type", Value::text("")),
        ("qos_algorithm_params", empty()),
        ("qos_supported_algorithms", none()),
        ("metrics", Value::text(NULL)),
        ("MAC_autogenerated", Value::Bool(card.mac.is_none())),
        ("locking_mode", Value::text("network_default")),
        ("ipv4_allowed", none()),
        ("ipv6_allowed", none()),
        ("ipv4_configuration_mode", Value::text("None")),
        ("ipv4_addresses", none()),
        ("ipv4_gateway", Value::text("")),
        ("ipv6_configuration_mode", Value::text("None")),
        ("ipv6_addresses", none()),
        ("ipv6_gateway", Value::text("")),
    ])
}

fn platform(machine: &Machine) -> Value {
    let mut platform = vec![
        ("acpi", "1".to_owned()),
        ("apic", "true".to_owned()),
        ("pae", "true".to_owned()),
        ("nx", "true".to_owned()),
        ("viridian", "true".to_owned()),
        ("hpet", "true".to_owned()),
        ("secureboot", (machine.firmware == Firmware::UefiSecure).to_string()),
        ("vtpm", machine.has_tpm.to_string()),
        (
            "device-model",
            if is_uefi(machine) {
                "qemu-upstream-uefi"
            } else {
                "qemu-upstream-compat"
            }
            .to_owned(),
        ),
    ];
    if let Some(topology) = machine.topology {
        platform.push(("cores-per-socket", topology.core_count.to_string()));
    }
    if machine.clock == Clock::Utc {
        platform.push(("timeoffset", "0".to_owned()));
    }
    let members = platform
        .into_iter()
        .map(|(name, text)| (name.to_owned(), Value::Text(text)));
    Value::Struct(members.collect())
}

fn is_uefi(machine: &Machine) -> bool {
    matches!(machine.firmware, Firmware::Uefi | Firmware::UefiSecure)
}

/// The boot order, as letters of drives.
fn boot_order(machine: &Machine) -> String {
    let mut order: Vec<(u32, char)> = Vec::new();
    for disk in &machine.disks {
        let letter = if disk.kind == DiskKind::Cdrom { 'd' } else { 'c' };
        if let Some(place) = disk.boot_order
            && order.iter().all(|(_, known)| *known != letter)
        {
            order.push((place, letter));
        }
    }
    order.sort_unstable();
    let letters: String = order.into_iter().map(|(_, letter)| letter).collect();
    if letters.is_empty() { "cd".to_owned() } else { letters }
}

pub(super) fn vm_record(machine: &Machine, vbds: &[Value], vifs: &[Value], options: &mut XenOptions<'_>) -> Value {
    let is_paravirtual = machine.firmware == Firmware::Paravirtual;
    let memory = machine.memory_bytes.to_string();
    let processors = machine.processor_count.to_string();
    let uuid = machine.uuid.clone().unwrap_or_else(|| (options.new_uuid)());
    let boot = structure([
        ("firmware", Value::text(if is_uefi(machine) { "uefi" } else { "bios" })),
        ("order", Value::text(boot_order(machine))),
    ]);
    let text = |text: &str| Value::text(text);
    let members: Vec<(&str, Value)> = vec![
        ("uuid", Value::text(uuid)),
        ("name_label", text(&machine.name)),
        ("name_description", text(&machine.description)),
        ("power_state", text("Halted")),
        ("user_version", text("1")),
        ("is_a_template", Value::Bool(false)),
        ("is_default_template", Value::Bool(false)),
        ("is_control_domain", Value::Bool(false)),
        ("memory_overhead", text("0")),
        ("memory_target", text("0")),
        ("memory_static_max", text(&memory)),
        ("memory_static_min", text(&memory)),
        ("memory_dynamic_max", text(&memory)),
        ("memory_dynamic_min", text(&memory)),
        ("VCPUs_params", empty()),
        ("VCPUs_max", text(&processors)),
        ("VCPUs_at_startup", text(&processors)),
        ("actions_after_shutdown", text("destroy")),
        ("actions_after_reboot", text("restart")),
        ("actions_after_crash", text("restart")),
        ("VBDs", Value::Array(vbds.to_vec())),
        ("VIFs", Value::Array(vifs.to_vec())),
        ("PV_bootloader", text(if is_paravirtual { "pygrub" } else { "" })),
        ("HVM_boot_policy", text(if is_paravirtual { "" } else { "BIOS order" })),
        ("HVM_boot_params", boot),
        ("HVM_shadow_multiplier", text("1")),
        ("platform", platform(machine)),
        (
            "other_config",
            structure([("mac_seed", Value::text((options.new_uuid)()))]),
        ),
        ("domain_type", text(if is_paravirtual { "pv" } else { "hvm" })),
        ("domid", text("-1")),
        ("has_vendor_device", Value::Bool(false)),
        ("requires_reboot", Value::Bool(false)),
        ("ha_always_run", Value::Bool(false)),
        ("is_a_snapshot", Value::Bool(false)),
        ("is_snapshot_from_vmpp", Value::Bool(false)),
        ("is_vmss_snapshot", Value::Bool(false)),
        ("snapshot_time", epoch()),
        ("start_delay", text("0")),
        ("shutdown_delay", text("0")),
        ("order", text("0")),
        ("version", text("0")),
        ("hardware_platform_version", text("0")),
    ];
    let of = |names: &[&'static str], value: fn() -> Value| -> Vec<(&'static str, Value)> {
        names.iter().map(|name| (*name, value())).collect()
    };
    let silent = [
        of(TEXTS, || Value::text("")),
        of(LISTS, none),
        of(MAPS, empty),
        of(REFERENCES, || Value::text(NULL)),
    ];
    let members = members.into_iter().chain(silent.into_iter().flatten());
    Value::Struct(members.map(|(name, value)| (name.to_owned(), value)).collect())
}
