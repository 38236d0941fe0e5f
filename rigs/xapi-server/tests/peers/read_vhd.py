"""Reads a dynamic or differencing VHD, implemented from the specification alone.

Arguments: the VHD, the file to write, and for a differencing disk the raw disk below it. Prints a line of JSON.
"""
import json
import struct
import sys

data = open(sys.argv[1], "rb").read()


def checked(part, at):
    stored = struct.unpack_from(">I", part, at)[0]
    rest = part[:at] + bytes(4) + part[at + 4 :]
    assert stored == ~sum(rest) & 0xFFFFFFFF, "checksum"
    return part


footer = checked(data[:512], 64)
assert footer[:8] == b"conectix" and data[-512:] == footer
header_at, = struct.unpack_from(">Q", footer, 16)
size, = struct.unpack_from(">Q", footer, 48)
kind, = struct.unpack_from(">I", footer, 60)
header = checked(data[header_at : header_at + 1024], 36)
table_at, = struct.unpack_from(">Q", header, 16)
count, block_bytes = struct.unpack_from(">II", header, 28)
assert count == -(-size // block_bytes)
parent = header[40:56].hex()
disk = bytearray(open(sys.argv[3], "rb").read() if kind == 4 else size)
assert len(disk) == size
table = struct.unpack_from(f">{count}I", data, table_at)
marked = 0
for number, sector in enumerate(table):
    if sector == 0xFFFFFFFF:
        continue
    bitmap = data[sector * 512 : sector * 512 + 512]
    block = data[sector * 512 + 512 : sector * 512 + 512 + block_bytes]
    for index in range(block_bytes // 512):
        if bitmap[index // 8] & 0x80 >> index % 8:
            marked += 1
            at = number * block_bytes + index * 512
            disk[at : min(at + 512, size)] = block[index * 512 : index * 512 + min(512, max(0, size - at))]
open(sys.argv[2], "wb").write(disk[:size])
print(json.dumps({
    "kind": kind,
    "blocks": [number for number, sector in enumerate(table) if sector != 0xFFFFFFFF],
    "sorted": list(filter(lambda s: s != 0xFFFFFFFF, table)) == sorted(s for s in table if s != 0xFFFFFFFF),
    "marked": marked,
    "parent": parent,
    "creator": footer[28:32].decode(),
}))
