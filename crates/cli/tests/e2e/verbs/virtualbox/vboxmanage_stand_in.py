#!/usr/bin/env python3
"""Stands in for VBoxManage where there is no VirtualBox: it replays transcripts, and changes the files of a machine as VirtualBox does.

A snapshot makes a new differencing VDI for every disk that has snapshots, and rewrites the settings; the machine, which does not run at all,
then writes to the new image. Deleting the snapshot brings that down into the image below. The VDIs are written here by this script alone, so that they
are not what the program under test believes a VDI to be.

VBOX_USER_HOME has VirtualBox.xml, and beside it: `state-UUID` with the state of a machine, `fail-VERB` with the name of a transcript that is
replayed in place of that verb, `quiet` if snapshots are taken as by a version that does not tell their UUIDs, and `asked`, which this writes.
"""
import json
import os
import struct
import sys
import uuid
import xml.etree.ElementTree as ET

NS = "http://www.virtualbox.org/"
HOME = os.environ["VBOX_USER_HOME"]
TRANSCRIPTS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "transcripts")
FREE = 0xFFFFFFFF
ZERO = 0xFFFFFFFE
MIB = 1 << 20
ET.register_namespace("", NS)

LAB = {
    "name": "lab one",
    "uuid": "9f6d1b8e-1f2a-4c3d-8e4f-5a6b7c8d9e0f",
    "settings": "/home/ana/VirtualBox VMs/lab one/lab one.vbox",
    "folder": "/home/ana/VirtualBox VMs/lab one",
    "snapshot": "727b376b-edaf-4a85-8f75-0e5604004a37",
    "snapshot_name": "holdfast-backup-0000002a",
}


def replay(transcript, /, **values):
    """Says what a transcript says, of another machine, and ends as it ended."""
    with open(os.path.join(TRANSCRIPTS, transcript + ".txt")) as file:
        text = file.read()
    for key in ("settings", "folder", "uuid", "snapshot", "snapshot_name", "name"):
        if key in values:
            text = text.replace(LAB[key], values[key])
    text = text.replace('VMState="running"', 'VMState="%s"' % values.get("state", "running"))
    code = 0
    for line in text.splitlines():
        if line.startswith("exit "):
            code = int(line[5:])
        elif line.startswith("! "):
            print(line[2:], file=sys.stderr)
        else:
            print(line)
    sys.exit(code)


def tag(name):
    return "{%s}%s" % (NS, name)


def registered():
    root = ET.parse(os.path.join(HOME, "VirtualBox.xml")).getroot()
    for entry in root.iter(tag("MachineEntry")):
        yield entry.get("uuid").strip("{}"), entry.get("src")


class Machine:
    def __init__(self, word):
        for known, path in registered():
            try:
                machine = ET.parse(path).getroot().find(tag("Machine"))
            except (OSError, ET.ParseError):
                continue
            if word in (known, machine.get("name")):
                self.uuid, self.path, self.name = known, path, machine.get("name")
                self.folder = os.path.dirname(path)
                return
        replay("error-not-found", name=word)

    def values(self, **more):
        return dict(name=self.name, uuid=self.uuid, settings=self.path, folder=self.folder, state=self.state(), **more)

    def state(self):
        try:
            with open(os.path.join(HOME, "state-" + self.uuid)) as file:
                return file.read().strip()
        except OSError:
            return "poweroff"

    def open(self):
        self.tree = ET.parse(self.path)
        self.element = self.tree.getroot().find(tag("Machine"))

    def save(self):
        self.tree.write(self.path + ".new", xml_declaration=True, encoding="utf-8")
        os.rename(self.path + ".new", self.path)

    def medium(self, wanted):
        for medium in self.element.iter(tag("HardDisk")):
            if medium.get("uuid").strip("{}") == wanted:
                return medium
        raise KeyError(wanted)

    def parent_of(self, child):
        for element in self.element.iter():
            if child in list(element):
                return element

    def attachments(self, hardware):
        for device in hardware.iter(tag("AttachedDevice")):
            image = device.find(tag("Image"))
            if device.get("type") == "HardDisk" and image is not None:
                yield image

    def file(self, medium):
        return os.path.join(self.folder, medium.get("location"))

    def kind(self, medium):
        while medium is not None and medium.tag == tag("HardDisk"):
            top = medium
            medium = self.parent_of(medium)
        return top.get("type")

    def snapshots(self):
        return list(self.element.iter(tag("Snapshot")))


class Vdi:
    """A VDI with blocks of 1 MiB."""

    def __init__(self, path):
        self.path = path
        with open(path, "rb") as file:
            header = file.read(512)
        self.map_at, self.data_at = struct.unpack_from("<II", header, 0x154)
        self.size, = struct.unpack_from("<Q", header, 0x170)
        self.block, self.extra, self.count, self.stored = struct.unpack_from("<IIII", header, 0x178)
        self.id, self.modification = header[0x188:0x198], header[0x198:0x1A8]

    @staticmethod
    def difference(path, parent):
        own = uuid.uuid4()
        header = bytearray(512)
        header[0:40] = b"<<< Oracle VM VirtualBox Disk Image >>>\n"
        struct.pack_into("<IIII", header, 0x40, 0xBEDA107F, 0x00010001, 400, 4)
        map_at = 512
        data_at = (map_at + 4 * parent.count + 511) // 512 * 512
        struct.pack_into("<II", header, 0x154, map_at, data_at)
        struct.pack_into("<I", header, 0x168, 512)
        struct.pack_into("<Q", header, 0x170, parent.size)
        struct.pack_into("<IIII", header, 0x178, MIB, 0, parent.count, 0)
        header[0x188:0x198] = own.bytes_le
        header[0x198:0x1A8] = uuid.uuid4().bytes_le
        header[0x1A8:0x1B8] = parent.id
        header[0x1B8:0x1C8] = parent.modification
        with open(path, "wb") as file:
            file.write(header)
            file.write(struct.pack("<I", FREE) * parent.count)
            file.truncate(data_at)
        return str(own)

    def map(self):
        with open(self.path, "rb") as file:
            file.seek(self.map_at)
            return list(struct.unpack("<%dI" % self.count, file.read(4 * self.count)))

    def read(self, number, entry):
        if entry == ZERO:
            return bytes(self.block)
        with open(self.path, "rb") as file:
            file.seek(self.data_at + entry * (self.block + self.extra) + self.extra)
            return file.read(self.block)

    def write(self, number, data):
        entries = self.map()
        with open(self.path, "r+b") as file:
            if entries[number] in (FREE, ZERO):
                entries[number] = self.stored
                self.stored += 1
                file.seek(self.map_at + 4 * number)
                file.write(struct.pack("<I", entries[number]))
                file.seek(0x184)
                file.write(struct.pack("<I", self.stored))
            file.seek(self.data_at + entries[number] * (self.block + self.extra) + self.extra)
            file.write(data)
            # A caller that differs from it gets an error.
            file.seek(0x198)
            file.write(uuid.uuid4().bytes_le)


def take(machine, name, description):
    machine.open()
    own = str(uuid.uuid4())
    hardware = machine.element.find(tag("Hardware"))
    snapshot = ET.Element(tag("Snapshot"), uuid="{%s}" % own, name=name, timeStamp="2026-11-23T08:45:16Z")
    ET.SubElement(snapshot, tag("Description")).text = description
    snapshot.append(ET.fromstring(ET.tostring(hardware)))
    folder = os.path.join(machine.folder, machine.element.get("snapshotFolder", "Snapshots"))
    os.makedirs(folder, exist_ok=True)
    if machine.state() != "poweroff":
        state = "Snapshots/%s.sav" % own
        snapshot.set("stateFile", state)
        with open(os.path.join(machine.folder, state), "wb") as file:
            file.write(b"\x7fVirtualBox SavedState V2.0\n" + bytes(4096))
    for image in machine.attachments(hardware):
        medium = machine.medium(image.get("uuid").strip("{}"))
        if machine.kind(medium) in ("Writethrough", "Shareable", "Readonly"):
            continue
        path = os.path.join(folder, "new.vdi")
        new = Vdi.difference(path, Vdi(machine.file(medium)))
        location = os.path.join(folder, "{%s}.vdi" % new)
        os.rename(path, location)
        relative = os.path.relpath(location, machine.folder)
        ET.SubElement(medium, tag("HardDisk"), uuid="{%s}" % new, location=relative, format="VDI")
        image.set("uuid", "{%s}" % new)
        # The machine keeps running.
        Vdi(location).write(1, b"\xee" * MIB)
    current = machine.element.get("currentSnapshot")
    if current is None:
        machine.element.insert(list(machine.element).index(hardware), snapshot)
    else:
        above = [one for one in machine.snapshots() if one.get("uuid") == current][0]
        below = above.find(tag("Snapshots"))
        if below is None:
            below = ET.SubElement(above, tag("Snapshots"))
        below.append(snapshot)
    machine.element.set("currentSnapshot", "{%s}" % own)
    machine.save()
    return own


def delete(machine, wanted):
    machine.open()
    snapshot = [one for one in machine.snapshots() if wanted in (one.get("uuid").strip("{}"), one.get("name"))]
    if not snapshot:
        replay("error-not-found", **machine.values())
    snapshot = snapshot[0]
    now = {}
    for image in machine.attachments(machine.element.find(tag("Hardware"))):
        now[image.get("uuid").strip("{}")] = image
    for image in machine.attachments(snapshot.find(tag("Hardware"))):
        base = machine.medium(image.get("uuid").strip("{}"))
        for above in base.findall(tag("HardDisk")):
            own = above.get("uuid").strip("{}")
            parent, child = Vdi(machine.file(base)), Vdi(machine.file(above))
            for number, entry in enumerate(child.map()):
                if entry != FREE:
                    parent.write(number, child.read(number, entry))
            now[own].set("uuid", base.get("uuid"))
            base.remove(above)
            os.unlink(child.path)
    if snapshot.get("stateFile"):
        os.unlink(os.path.join(machine.folder, snapshot.get("stateFile")))
    outer = machine.parent_of(snapshot)
    outer.remove(snapshot)
    above = machine.parent_of(outer)
    if outer.tag == tag("Snapshots"):
        machine.element.set("currentSnapshot", above.get("uuid"))
        if len(outer) == 0:
            above.remove(outer)
    else:
        del machine.element.attrib["currentSnapshot"]
    machine.save()
    return snapshot.get("name"), snapshot.get("uuid").strip("{}")


def main(words):
    with open(os.path.join(HOME, "asked"), "a") as file:
        file.write(json.dumps(words) + "\n")
    verb = words[2] if words[0] == "snapshot" else words[0]
    try:
        with open(os.path.join(HOME, "fail-" + verb)) as file:
            failure = file.read().strip()
    except OSError:
        failure = None
    if words == ["list", "vms"]:
        for known, path in registered():
            name = ET.parse(path).getroot().find(tag("Machine")).get("name") if os.path.exists(path) else "<inaccessible>"
            print('"%s" {%s}' % (name, known))
    elif words[0] == "registervm":
        if failure:
            replay(failure, settings=words[1])
        path = os.path.join(HOME, "VirtualBox.xml")
        tree = ET.parse(path)
        own = ET.parse(words[1]).getroot().find(tag("Machine")).get("uuid")
        if own.strip("{}") in [known for known, _ in registered()]:
            replay("error-register", uuid=own.strip("{}"))
        registry = tree.getroot().find(tag("Global")).find(tag("MachineRegistry"))
        ET.SubElement(registry, tag("MachineEntry"), uuid=own, src=words[1])
        tree.write(path, xml_declaration=True, encoding="utf-8")
    else:
        machine = Machine(words[1])
        if failure:
            # One that fails late has taken its snapshot.
            if failure == "late":
                take(machine, words[3], words[5])
                failure = "error-locked"
            # One that says that it has done what it has not, and one that is killed.
            if failure == "nothing":
                return
            if failure == "killed":
                os.kill(os.getpid(), 9)
            replay(failure, **machine.values())
        if verb == "showvminfo":
            replay("showvminfo-running", **machine.values())
        elif verb == "take":
            own = take(machine, words[3], words[5])
            if not os.path.exists(os.path.join(HOME, "quiet")):
                replay("snapshot-take", snapshot=own)
        elif verb == "delete":
            name, own = delete(machine, words[3])
            replay("snapshot-delete", snapshot=own, snapshot_name=name)
        else:
            sys.exit("this stand-in does not know " + " ".join(words))


main(sys.argv[1:])
