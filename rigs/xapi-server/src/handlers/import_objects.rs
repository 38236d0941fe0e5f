//! Creates the objects of an archive, class by class, in XAPI's order: storage, disks, machines, networks, and the
//! devices that connect them.
//!
//! Source: `ocaml/xapi/import.ml`. Devices of the host, guest metrics and the state of TPMs are ignored.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::call::planned_failure;
use crate::call::vdi::{new_vdi, rounded_size};
use crate::call::vm::{refuse_power_state, remove as remove_vm};
use crate::database::{NULL, Record, flag, new_uuid, number, text};
use crate::failure::{Answer, Failure};
use crate::pool::{Pool, State};
use crate::schema;
use crate::xva::ova::Object;

/// The source of a machine's disks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Disks {
    /// The archive contains the disks; they are created on this storage.
    InArchive { sr: String },
    /// The disks already exist in the pool, with the UUIDs in the archive.
    InPool,
}

/// The objects that an import has created so far.
#[derive(Debug, Default)]
pub(super) struct Made {
    pub(super) vms: Vec<String>,
    /// Disks by their ids in the archive.
    pub(super) vdis: BTreeMap<String, String>,
    pub(super) networks: Vec<String>,
}

/// A running import.
pub(super) struct Import<'a> {
    pub(super) objects: &'a [Object],
    pub(super) disks: &'a Disks,
    /// Whether the machine keeps its identity.
    pub(super) is_restore: bool,
    pub(super) task: &'a str,
}

fn not_found(id: &str) -> Failure {
    Failure::new("IMPORT_ERROR_FAILED_TO_FIND_OBJECT", &[id])
}

fn find<'o>(objects: &'o [Object], id: &str) -> Answer<&'o Object> {
    objects
        .iter()
        .find(|object| object.id == id)
        .ok_or_else(|| not_found(id))
}

/// Whether a disk is in an ISO library. Such disks are looked up, and not imported.
fn is_medium(objects: &[Object], vdi: &Object) -> Answer<bool> {
    let sr = find(objects, text(&vdi.record, "SR"))?;
    Ok(text(&sr.record, "content_type") == "iso")
}

/// The disks whose data is in the archive: disks of machines, and disks with their memory.
pub(super) fn streamed(objects: &[Object]) -> Answer<Vec<&Object>> {
    let mut streamed = Vec::new();
    let is_disk = |object: &&Object| object.class == "VBD" && text(&object.record, "type") != "CD";
    let mut of_disks = Vec::new();
    for vbd in objects.iter().filter(is_disk) {
        let id = text(&vbd.record, "VDI");
        if !is_medium(objects, find(objects, id)?)? {
            of_disks.push(id);
        }
    }
    for vdi in objects.iter().filter(|object| object.class == "VDI") {
        if of_disks.contains(&vdi.id.as_str()) || text(&vdi.record, "type") == "suspend" {
            streamed.push(vdi);
        }
    }
    Ok(streamed)
}

fn kept_of_vdi(record: &Record) -> Record {
    let kept = [
        "name_label",
        "name_description",
        "type",
        "sharable",
        "read_only",
        "xenstore_data",
        "other_config",
        "tags",
    ];
    let fields = record.iter().filter(|(name, _)| kept.contains(&name.as_str()));
    fields.map(|(name, value)| (name.clone(), value.clone())).collect()
}

fn mac_seed(record: &Record) -> Option<&str> {
    record.get("other_config")?.get("mac_seed")?.as_str()
}

/// Replaces an existing machine with the same identity, if it is halted and older.
fn replace(state: &mut State, record: &Record) -> Answer<()> {
    let Ok(old) = state.database.by_uuid("VM", text(record, "uuid")) else {
        return Ok(());
    };
    let known = state.database.get("VM", &old)?;
    refuse_power_state(known, &old, &["Halted"])?;
    let versions = [number(known, "version"), number(record, "version")];
    if versions[0] >= versions[1] {
        let words = versions.map(|version| version.to_string());
        return Err(Failure::new(
            "VM_TO_IMPORT_IS_NOT_NEWER_VERSION",
            &[&old, &words[0], &words[1]],
        ));
    }
    remove_vm(state, &old)
}

impl Import<'_> {
    /// Creates all objects that the records describe.
    pub(super) fn make(&self, pool: &Pool, made: &mut Made) -> Answer<()> {
        let mut state = pool.state();
        if self.is_restore {
            self.refuse_twins(&state)?;
        }
        for object in self.of("VDI") {
            if is_medium(self.objects, object)? {
                continue;
            }
            let vdi = match self.disks {
                Disks::InArchive { sr } => {
                    // It is made by that call, from within.
                    planned_failure(pool, "VDI.create").map_or(Ok(()), Err)?;
                    let size_bytes = rounded_size(number(&object.record, "virtual_size"));
                    new_vdi(pool, &mut state, sr, size_bytes, &kept_of_vdi(&object.record))?
                }
                Disks::InPool => match state.database.by_uuid("VDI", text(&object.record, "uuid")) {
                    Ok(vdi) => vdi,
                    Err(_) => {
                        return Err(Failure::new(
                            "VDI_LOCATION_MISSING",
                            &[NULL, text(&object.record, "location")],
                        ));
                    }
                },
            };
            made.vdis.insert(object.id.clone(), vdi);
        }
        for object in self.of("VM") {
            let vm = self.make_vm(&mut state, object, made)?;
            let of_it = |device: &&Object| text(&device.record, "VM") == object.id;
            for vbd in self.of("VBD").filter(of_it) {
                self.make_vbd(&mut state, &vm, object, vbd, made)?;
            }
            for vif in self.of("VIF").filter(of_it) {
                self.make_vif(&mut state, &vm, vif, made)?;
            }
        }
        Ok(())
    }

    fn of(&self, class: &'static str) -> impl Iterator<Item = &Object> {
        self.objects.iter().filter(move |object| object.class == class)
    }

    /// Refuses a machine with the MAC seed of an existing one: both would generate the same addresses. Only a machine
    /// and its own snapshots may have the same seed.
    fn refuse_twins(&self, state: &State) -> Answer<()> {
        for new in self.of("VM") {
            let Some(seed) = mac_seed(&new.record) else { continue };
            let is_same = |old: &Record| {
                let is_of_it = text(old, "snapshot_metadata").contains(text(&new.record, "uuid"));
                text(old, "uuid") == text(&new.record, "uuid") || (flag(old, "is_a_snapshot") && is_of_it)
            };
            let mut others = state.database.all("VM").filter(|(_, old)| mac_seed(old) == Some(seed));
            if !others.all(|(_, old)| flag(&new.record, "is_a_snapshot") || is_same(old)) {
                return Err(Failure::new("DUPLICATE_MAC_SEED", &[seed]));
            }
        }
        Ok(())
    }

    fn make_vm(&self, state: &mut State, object: &Object, made: &mut Made) -> Answer<String> {
        let mut record = object.record.clone();
        if self.is_restore {
            replace(state, &record)?;
        }
        let suspended = if text(&record, "power_state") == "Suspended" {
            let id = text(&record, "suspend_VDI");
            Some(made.vdis.get(id).cloned().ok_or_else(|| not_found(id))?)
        } else {
            None
        };
        let changes = json!({
            "uuid": if self.is_restore { text(&record, "uuid").to_owned() } else { new_uuid() },
            "power_state": if suspended.is_some() { "Suspended" } else { "Halted" },
            "suspend_VDI": suspended.as_deref().unwrap_or(NULL), "version": if self.is_restore { number(&record, "version") + 1 } else { 0 },
            "VBDs": [], "VIFs": [], "snapshots": [], "snapshot_of": NULL, "parent": NULL, "children": [], "metrics": NULL,
            "guest_metrics": NULL, "resident_on": NULL, "affinity": NULL, "domid": -1, "VTPMs": [],
            "current_operations": {self.task: "import"},
        });
        if let Value::Object(changes) = changes {
            record.extend(changes);
        }
        if !self.is_restore
            && let Some(config) = record.get_mut("other_config").and_then(Value::as_object_mut)
        {
            config.insert("mac_seed".to_owned(), json!(new_uuid()));
        }
        let vm = state.database.insert("VM", record);
        made.vms.push(vm.clone());
        Ok(vm)
    }

    fn make_vbd(&self, state: &mut State, vm: &str, of: &Object, vbd: &Object, made: &Made) -> Answer<()> {
        if self.is_restore && state.database.by_uuid("VBD", text(&vbd.record, "uuid")).is_ok() {
            return Ok(());
        }
        let is_drive = text(&vbd.record, "type") == "CD";
        let vdi = made.vdis.get(text(&vbd.record, "VDI"));
        let is_attached = flag(&vbd.record, "currently_attached");
        // The drive of a machine with emulated hardware is emptied if its medium is missing.
        let may_be_emptied = is_drive && text(&of.record, "domain_type") == "hvm";
        if is_attached && vdi.is_none() && !may_be_emptied {
            return Err(Failure::new("IMPORT_ERROR_ATTACHED_DISKS_NOT_FOUND", &[]));
        }
        if vdi.is_none() && !is_drive {
            return Ok(());
        }
        let changes = json!({
            "uuid": self.uuid_of(vbd), "VM": vm, "VDI": vdi.map_or(NULL, String::as_str), "empty": vdi.is_none(), "device": "",
            "currently_attached": is_attached,
        });
        let vbd = state.database.insert("VBD", changed(vbd, changes));
        state.database.append("VM", vm, "VBDs", &vbd)?;
        match vdi {
            Some(vdi) => state.database.append("VDI", vdi, "VBDs", &vbd),
            None => Ok(()),
        }
    }

    /// Creates a network card. Its address is kept only if the machine is restored.
    fn make_vif(&self, state: &mut State, vm: &str, vif: &Object, made: &mut Made) -> Answer<()> {
        if self.is_restore && state.database.by_uuid("VIF", text(&vif.record, "uuid")).is_ok() {
            return Ok(());
        }
        let network = self.network(state, text(&vif.record, "network"), made)?;
        let is_off = text(state.database.get("VM", vm)?, "power_state") == "Halted";
        let mut changes = json!({
            "uuid": self.uuid_of(vif), "VM": vm, "network": network,
            "currently_attached": !is_off && flag(&vif.record, "currently_attached"),
        });
        if !self.is_restore {
            changes["MAC"] = json!(crate::call::mac_from(&new_uuid()));
            changes["MAC_autogenerated"] = json!(true);
        }
        let vif = state.database.insert("VIF", changed(vif, changes));
        state.database.append("VM", vm, "VIFs", &vif)?;
        state.database.append("network", &network, "VIFs", &vif)
    }

    fn uuid_of(&self, device: &Object) -> String {
        let own = Some(text(&device.record, "uuid")).filter(|uuid| self.is_restore && !uuid.is_empty());
        own.map_or_else(new_uuid, str::to_owned)
    }

    /// The network of a card: the one with its name, otherwise the one with its bridge, otherwise a new one.
    fn network(&self, state: &mut State, id: &str, made: &mut Made) -> Answer<String> {
        let record = &find(self.objects, id)?.record;
        let of = |field: &str| {
            state
                .database
                .having("network", field, text(record, field))
                .into_iter()
                .next()
        };
        if let Some(network) = of("name_label").or_else(|| of("bridge")) {
            return Ok(network);
        }
        let mut new = schema::blank("network");
        let kept = ["name_label", "name_description", "bridge", "MTU"];
        new.extend(
            record
                .iter()
                .filter(|(name, _)| kept.contains(&name.as_str()))
                .map(|(name, value)| (name.clone(), value.clone())),
        );
        new.insert("uuid".to_owned(), json!(new_uuid()));
        let network = state.database.insert("network", new);
        made.networks.push(network.clone());
        Ok(network)
    }
}

fn changed(object: &Object, changes: Value) -> Record {
    let mut record = object.record.clone();
    if let Value::Object(changes) = changes {
        record.extend(changes);
    }
    record
}
