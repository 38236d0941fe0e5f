"""An XVA reader of its own, from the description of the format: writes each disk to FOLDER/ID, and fails where a checksum does."""
import os
import sys
import tarfile
import xml.etree.ElementTree as ElementTree

PRIMES = [11400714785074694791, 14029467366897019727, 1609587929392839161, 9650029242287828579, 2870177450012600261]
MASK = (1 << 64) - 1


def rotated(value, count):
    return ((value << count) | (value >> (64 - count))) & MASK


def turn(lane, word):
    return rotated((lane + word * PRIMES[1]) & MASK, 31) * PRIMES[0] & MASK


def xxh64(data):
    """XXH64 with seed 0, by its published description."""
    at = 0
    if len(data) >= 32:
        lanes = [(PRIMES[0] + PRIMES[1]) & MASK, PRIMES[1], 0, -PRIMES[0] & MASK]
        while at + 32 <= len(data):
            for number in range(4):
                lanes[number] = turn(lanes[number], int.from_bytes(data[at:at + 8], "little"))
                at += 8
        value = sum(rotated(lane, count) for lane, count in zip(lanes, (1, 7, 12, 18))) & MASK
        for lane in lanes:
            value = ((value ^ turn(0, lane)) * PRIMES[0] + PRIMES[3]) & MASK
    else:
        value = PRIMES[4]
    value = (value + len(data)) & MASK
    while at + 8 <= len(data):
        value ^= turn(0, int.from_bytes(data[at:at + 8], "little"))
        value = (rotated(value, 27) * PRIMES[0] + PRIMES[3]) & MASK
        at += 8
    if at + 4 <= len(data):
        value ^= int.from_bytes(data[at:at + 4], "little") * PRIMES[0] & MASK
        value = (rotated(value, 23) * PRIMES[1] + PRIMES[2]) & MASK
        at += 4
    for byte in data[at:]:
        value ^= byte * PRIMES[4] & MASK
        value = rotated(value, 11) * PRIMES[0] & MASK
    value ^= value >> 33
    value = value * PRIMES[1] & MASK
    value ^= value >> 29
    value = value * PRIMES[2] & MASK
    return value ^ value >> 32


def members_of(struct):
    return {member.findtext("name"): member.find("value") for member in struct.find("struct")}


def main(archive, folder):
    disks = {}
    before = None
    block = None
    with tarfile.open(archive, "r|*") as tar:
        for member in tar:
            content = tar.extractfile(member).read()
            if member.name == "ova.xml":
                root = members_of(ElementTree.fromstring(content))
                for item in root["objects"].find("array").find("data"):
                    item = members_of(item)
                    if "".join(item["class"].itertext()) == "VDI":
                        size = "".join(members_of(item["snapshot"])["virtual_size"].itertext())
                        disks["".join(item["id"].itertext())] = [int(size), 0, -1]
                continue
            name, _, number = member.name.partition("/")
            number, _, kind = number.partition(".")
            if kind == "xxhash":
                assert before == member.name[:-len(".xxhash")], member.name
                assert content.decode() == "%016X" % xxh64(block), member.name
                continue
            assert kind == "" and member.name > (before or ""), member.name
            before, block = member.name, content
            disk = disks[name]
            skipped = int(number) - disk[2] - 1
            with open(os.path.join(folder, name), "ab") as file:
                file.truncate(disk[1] + skipped * (1 << 20))
                file.seek(0, os.SEEK_END)
                file.write(content)
                disk[1] = file.tell()
            disk[2] = int(number)
    for name, (size, end, _) in disks.items():
        assert size == end, (name, size, end)


main(*sys.argv[1:])
