"""Reads an XVA, implemented from the description of the format alone: prints its content and writes its disks to files.

Arguments: the XVA, a folder for the disks. Prints a line of JSON.
"""
import hashlib
import json
import sys
import tarfile
import xml.etree.ElementTree as tree

PRIMES = (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5)
MASK = (1 << 64) - 1


def rotated(value, bits):
    return (value << bits | value >> 64 - bits) & MASK


def xxh64(data):
    """XXH64 with seed 0."""
    one, two, three, four, five = PRIMES

    def mix(lane, word):
        return rotated((lane + word * two) & MASK, 31) * one & MASK

    position, end = 0, len(data)
    if end >= 32:
        lanes = [(one + two) & MASK, two, 0, -one & MASK]
        words = memoryview(data[: end // 32 * 32]).cast("Q")
        for index in range(0, len(words), 4):
            lanes = [mix(lane, words[index + number]) for number, lane in enumerate(lanes)]
        value = sum(rotated(lane, bits) for lane, bits in zip(lanes, (1, 7, 12, 18))) & MASK
        for lane in lanes:
            value = ((value ^ mix(0, lane)) * one + four) & MASK
        position = end // 32 * 32
    else:
        value = five
    value = (value + end) & MASK
    while position + 8 <= end:
        value ^= mix(0, int.from_bytes(data[position : position + 8], "little"))
        value = (rotated(value, 27) * one + four) & MASK
        position += 8
    if position + 4 <= end:
        value ^= int.from_bytes(data[position : position + 4], "little") * one & MASK
        value = (rotated(value, 23) * two + three) & MASK
        position += 4
    for byte in data[position:]:
        value = rotated(value ^ byte * five & MASK, 11) * one & MASK
    value = (value ^ value >> 33) * two & MASK
    value = (value ^ value >> 29) * three & MASK
    return value ^ value >> 32


def plain(node):
    """A value of XML-RPC; numbers stay text."""
    kinds = list(node)
    if not kinds:
        return node.text or ""
    [kind] = kinds
    if kind.tag == "struct":
        return {member.find("name").text or "": plain(member.find("value")) for member in kind}
    if kind.tag == "array":
        return [plain(item) for item in kind.find("data")]
    return {"boolean": lambda text: text == "1", "double": float}.get(kind.tag, str)(kind.text or "")


archive = tarfile.open(sys.argv[1], "r|*")
members = iter(archive)
first = next(members)
assert first.name == "ova.xml", first.name
ova = plain(tree.fromstring(archive.extractfile(first).read()))
sizes = {it["id"]: int(it["snapshot"]["virtual_size"]) for it in ova["objects"] if it["class"] == "VDI"}
prefixes, kinds, empties, file, last_number = [], set(), 0, None, -1
for member in members:
    data = archive.extractfile(member).read()
    prefix, number = member.name.split("/")
    if prefix not in prefixes:
        prefixes.append(prefix)
        file = open(f"{sys.argv[2]}/{len(prefixes) - 1}.raw", "wb")
        file.truncate(sizes[prefix])
        offset, last_number = 0, -1
        unit = member.size
    assert int(number) > last_number, member.name
    offset += (int(number) - last_number - 1) * unit
    file.seek(offset)
    file.write(data)
    offset += len(data)
    empties += not data
    last_number = int(number)
    check = next(members)
    text = archive.extractfile(check).read().decode()
    expected = {f"{member.name}.xxhash": f"{xxh64(data):016X}", f"{member.name}.checksum": hashlib.sha1(data).hexdigest()}
    assert expected[check.name] == text, (check.name, text, expected)
    kinds.add(check.name.rsplit(".")[-1])
    if offset == sizes[prefix]:
        file.close()
assert prefixes == sorted(prefixes), prefixes
machines = [it["snapshot"] for it in ova["objects"] if it["class"] == "VM"]
print(json.dumps({
    "prefixes": prefixes,
    "checksums": sorted(kinds),
    "empty": empties,
    "names": [machine["name_label"] for machine in machines],
    "power": [machine["power_state"] for machine in machines],
    "references": sorted(it["id"] for it in ova["objects"]),
    "export_vsn": ova["version"]["export_vsn"],
}))
