"""Calls the server like a client that was written for XenServer, and checks the answers.

Uses the Python module XenAPI of the XenServer project, over XML-RPC. Arguments: the address, and the UUID of a running
machine with one disk of 8 MiB. When the script prints "write", the caller writes to the disk like the guest, and
answers with a line.
"""
import base64
import sys

import XenAPI

url, vm_uuid = sys.argv[1:3]


def fails(code, call, *arguments):
    try:
        call(*arguments)
    except XenAPI.Failure as failure:
        assert failure.details[0] == code, failure.details
        return failure.details[1:]
    raise AssertionError(f"{code} was expected")


session = XenAPI.Session(url, ignore_ssl=True)
fails("SESSION_AUTHENTICATION_FAILED", session.xenapi.login_with_password, "root", "wrong", "2.3", "test")
session.xenapi.login_with_password("root", "correct horse", "2.3", "test")
x = session.xenapi
host = x.session.get_this_host(session.handle)
assert x.host.get_record(host)["software_version"]["product_brand"] == "XCP-ng"
[pool] = x.pool.get_all_records().values()
assert pool["master"] == host

# Records, with their types on the wire.
vm = x.VM.get_by_uuid(vm_uuid)
record = x.VM.get_record(vm)
assert record["power_state"] == "Running" and record["VCPUs_max"] == "2", record
assert record["HVM_shadow_multiplier"] == 1.0 and record["is_a_template"] is False
assert type(record["snapshot_time"]).__name__ == "DateTime"
assert list(x.VM.get_all_records_where(f'field "uuid" = "{vm_uuid}" and field "is_a_snapshot" = "false"')) == [vm]
assert x.VM.get_by_name_label("no such") == []
fails("UUID_INVALID", x.VM.get_by_uuid, "nothing")
assert fails("HANDLE_INVALID", x.VM.get_record, "OpaqueRef:x") == ["VM", "OpaqueRef:x"]
assert fails("MESSAGE_METHOD_UNKNOWN", x.VM.dance, vm) == ["VM.dance"]
assert fails("MESSAGE_PARAMETER_COUNT_MISMATCH", x.VM.get_record) == ["VM.get_record", "1", "0"]
x.VM.add_to_other_config(vm, "holdfast", "1")
fails("MAP_DUPLICATE_KEY", x.VM.add_to_other_config, vm, "holdfast", "2")
x.VM.remove_from_other_config(vm, "holdfast")
assert "holdfast" not in x.VM.get_other_config(vm)

# A running machine cannot be destroyed, nor can its disks.
[vbd] = [vbd for vbd in record["VBDs"] if x.VBD.get_type(vbd) == "Disk"]
vdi = x.VBD.get_VDI(vbd)
assert fails("VM_BAD_POWER_STATE", x.VM.destroy, vm) == [vm, "halted, suspended", "running"]
assert fails("VDI_IN_USE", x.VDI.destroy, vdi) == [vdi, "destroy"]


def disk_of(machine):
    [disk] = [vbd for vbd in x.VM.get_VBDs(machine) if x.VBD.get_type(vbd) == "Disk"]
    return x.VBD.get_VDI(disk)


# Snapshots by tasks, and the changes between them.
def snapshot(name):
    task = getattr(x.Async.VM, "snapshot")(vm, name, [])
    assert x.task.get_status(task) == "pending"
    assert x.task.get_status(task) == "success"
    result = x.task.get_result(task)
    x.task.destroy(task)
    reference = result.removeprefix("<value>").removesuffix("</value>")
    assert x.VM.get_snapshot_of(reference) == vm and x.VM.get_is_a_template(reference)
    return reference


before_tracking = snapshot("before tracking")
x.VDI.enable_cbt(vdi)
first = snapshot("first")
print("write", flush=True)
sys.stdin.readline()
second = snapshot("second")
assert set(x.VM.get_snapshots(vm)) == {before_tracking, first, second}
one, two = disk_of(first), disk_of(second)
assert x.VDI.get_snapshot_of(one) == vdi and x.VDI.get_cbt_enabled(one)
changed = base64.b64decode(x.VDI.list_changed_blocks(one, two))
assert len(changed) == (8 << 20) // (64 << 10) // 8
bits = [index * 8 + bit for index, byte in enumerate(changed) for bit in range(8) if byte & 0x80 >> bit]
assert bits == [3, 4, 127], bits
fails("VDI_NO_CBT_METADATA", x.VDI.list_changed_blocks, disk_of(before_tracking), two)
fails("SR_BACKEND_FAILURE_460", x.VDI.list_changed_blocks, two, one)
fails("VDI_IN_USE", x.VDI.list_changed_blocks, one, vdi)

# The data of a snapshot is destroyed, and the record of its changes is kept; no machine may use it then.
assert fails("VDI_IN_USE", x.VDI.data_destroy, one) == [one, "data_destroy"]
x.VM.destroy(first)
x.VDI.data_destroy(one)
assert x.VDI.get_type(one) == "cbt_metadata"
assert base64.b64decode(x.VDI.list_changed_blocks(one, two)) == changed
fails("VDI_INCOMPATIBLE_TYPE", x.VDI.get_nbd_info, one)
fails("OPERATION_NOT_ALLOWED", x.VDI.data_destroy, vdi)
# After an interruption, tracking has no record of earlier changes.
x.VDI.disable_cbt(vdi)
x.VDI.enable_cbt(vdi)
third = snapshot("third")
fails("SR_BACKEND_FAILURE_460", x.VDI.list_changed_blocks, two, disk_of(third))

# A checkpoint contains the memory; clones, and machines created from records.
checkpoint = x.VM.checkpoint(vm, "with memory")
assert x.VM.get_power_state(checkpoint) == "Suspended"
memory = x.VM.get_suspend_VDI(checkpoint)
assert x.VDI.get_type(memory) == "suspend"
fails("VM_BAD_POWER_STATE", x.VM.clone, vm, "no")
x.VM.hard_shutdown(vm)
clone = x.VM.clone(vm, "clone")
macs = [x.VIF.get_MAC(x.VM.get_VIFs(machine)[0]) for machine in (vm, clone)]
assert macs[0] != macs[1]
new = {name: value for name, value in record.items() if name not in ("uuid", "VBDs", "VIFs")}
new["name_label"] = "made"
made = x.VM.create(new)
assert x.VM.get_record(made)["memory_static_max"] == record["memory_static_max"]
[sr] = [sr for sr, it in x.SR.get_all_records().items() if it["shared"]]
disk = x.VDI.create({"name_label": "new", "name_description": "", "SR": sr, "virtual_size": "3000000", "type": "user",
                     "sharable": False, "read_only": False, "other_config": {}, "xenstore_data": {}, "sm_config": {}, "tags": []})
assert x.VDI.get_virtual_size(disk) == str(4 << 20), "rounded up to blocks of 2 MiB"
connection = {"VM": made, "VDI": disk, "userdevice": "0", "bootable": True, "mode": "RW", "type": "Disk", "empty": False,
              "other_config": {}, "qos_algorithm_type": "", "qos_algorithm_params": {}}
x.VBD.create(connection)
fails("DEVICE_ALREADY_EXISTS", x.VBD.create, connection)
x.VM.start(made, False, False)
fails("VDI_IN_USE", x.VDI.resize, disk, str(8 << 20))
x.VM.hard_shutdown(made)
x.VDI.resize(disk, str(8 << 20))
fails("SR_BACKEND_FAILURE_79", x.VDI.resize, disk, str(2 << 20))

# Events: all objects for a client without a token, then only new events.
events = getattr(x.event, "from")
answer = events(["vm"], "", 1.0)
assert {event["operation"] for event in answer["events"]} == {"add"}
assert vm in [event["ref"] for event in answer["events"]]
x.VM.set_name_label(vm, "renamed")
answer = events(["vm"], answer["token"], 5.0)
[event] = answer["events"]
assert (event["operation"], event["ref"], event["snapshot"]["name_label"]) == ("mod", vm, "renamed"), event
assert events(["vm"], answer["token"], 0.05)["events"] == []
fails("EVENT_FROM_TOKEN_PARSE_FAILURE", events, ["vm"], "x", 1.0)

# Removes all created objects.
for machine in (before_tracking, second, third, checkpoint, clone, made):
    disks = [x.VBD.get_VDI(it) for it in x.VM.get_VBDs(machine) if x.VBD.get_type(it) == "Disk"]
    x.VM.destroy(machine)
    for it in disks:
        x.VDI.destroy(it)
x.VDI.destroy(memory)
x.VDI.destroy(one)
session.logout()
