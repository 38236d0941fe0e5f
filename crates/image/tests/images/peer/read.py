#!/usr/bin/env python3
"""Reads disks by programs that have nothing to do with Holdfast or QEMU, and writes what they read.

Each line of standard input is a request, with tabs between its words: PEER, FORMAT, TARGET, WHERE, IMAGE, and the parents
of the image from the top down. PEER is dissect, libvhdi or libvmdk. WHERE is "all", or OFFSET:LENGTH,... of what is read;
TARGET gets the bytes. The answer is a line: "size", a tab and the size of the disk; or "error", a tab and the error.

The programs are loaded once, which takes longer than most reads. Each request is answered by a process of its own, so
that no request depends on an earlier one.

Known defects of these programs are worked around, and each workaround names its defect. These programs are the reference,
not the subject of the test: they report with an exception what else they cannot read.
"""

import os
import sys
import traceback
from pathlib import Path

import pyvhdi
import pyvmdk
from dissect.hypervisor.disk import qcow2, vhd, vmdk
from dissect.hypervisor.disk.hdd import HDS
from dissect.hypervisor.disk.vdi import VDI
from dissect.hypervisor.disk.vhdx import VHDX

MIB = 1 << 20


class Device:
    """A disk of `size` bytes that is read in pieces of `step` bytes, each at a multiple of it."""

    def __init__(self, size, step, read):
        self.size, self.step, self.read_piece = size, step, read

    def read(self, offset, length):
        end = min(offset + length, self.size)
        at = offset // self.step * self.step
        pieces = []
        while at < end:
            piece_length = min(self.step, self.size - at)
            piece = self.read_piece(at, piece_length)
            if len(piece) != piece_length:
                raise IOError(f"{len(piece)} of {piece_length} bytes at {at}")
            pieces.append(piece)
            at += self.step
        start = offset % self.step
        return b"".join(pieces)[start : start + end - offset]


def of_stream(stream, size, step):
    def read(offset, length):
        stream.seek(offset)
        return stream.read(length)

    return Device(size, step, read)


def dissect_vdi(paths):
    stream = None
    for path in reversed(paths):
        image = VDI(path, parent=stream)
        stream = image.open()
    # 3.21: a read over several blocks takes the state of the first one for all of them (VDIStream._read). So: block by block.
    return of_stream(stream, image.size, image.block_size)


class InWholeBytes:
    """A VHDX whose sectors are read by whole bytes of its bitmap."""

    def __init__(self, image):
        self.image = image

    def read_sectors(self, sector, count):
        # 3.21: of a block that is present in part, bits are only right from the first bit of a byte on (_iter_partial_runs).
        first, end = sector // 8 * 8, -(-(sector + count) // 8) * 8
        end = min(end, self.image.size // self.image.sector_size)
        data, size = self.image.read_sectors(first, end - first), self.image.sector_size
        return data[(sector - first) * size : (sector - first + count) * size]


def dissect_vhdx(paths):
    image = VHDX(paths[0])
    # Parents are found by the image itself.
    layer = image
    while layer.parent is not None:
        parent = layer.parent
        layer.parent = InWholeBytes(parent)
        layer = parent
    # 3.21: a read that begins inside of a block goes on behind its end (VHDX.read_sectors). So: block by block.
    return of_stream(image, image.size, image.block_size)


def dissect_hds(paths):
    stream = None
    for path in reversed(paths):
        stream = HDS(path.open("rb"), parent=stream)
    # 3.21: a hole at the start is joined with the data behind it (HDS._iter_runs). So: cluster by cluster.
    return of_stream(stream, stream.size, stream.cluster_size)


def dissect(disk_format, paths):
    if disk_format == "vdi":
        return dissect_vdi(paths)
    if disk_format == "vhdx":
        return dissect_vhdx(paths)
    if disk_format == "parallels":
        return dissect_hds(paths)
    if disk_format == "vmdk":
        image = vmdk.VMDK(paths[0])
        # 3.21: the stream reads whole units of 8 KiB, also past the end of the disk, where there is no extent (VMDK.read_sectors).
        return Device(image.size, MIB, lambda offset, length: image.read_sectors(offset // 512, length // 512))
    elif disk_format == "vhd":
        # 3.21 has no bitmaps of sectors and no parents for VHD.
        stream = vhd.VHD(paths[0].open("rb"))
    elif disk_format == "qcow2":
        image = qcow2.QCow2(paths[0])
        stream = image.open()
    else:
        raise ValueError(disk_format)
    return of_stream(stream, stream.size, MIB)


def libvhdi(_disk_format, paths):
    # 20210425: of a differing VHDX without bitmaps it takes the start of the file for one. What the tests write has them.

    chain = []
    for path in reversed(paths):
        image = pyvhdi.file()
        image.open(str(path))
        if chain:
            image.set_parent(chain[-1])
        chain.append(image)
    return of_library(chain)


def libvmdk(_disk_format, paths):
    chain = []
    for path in reversed(paths):
        image = pyvmdk.handle()
        image.open(str(path))
        # Extents are named from where the program is.
        os.chdir(path.parent)
        image.open_extent_data_files()
        if chain:
            image.set_parent(chain[-1])
        chain.append(image)
    return of_library(chain)


def of_library(chain):
    # They do not keep their parents themselves: the chain does, as long as it is read.
    return Device(chain[-1].media_size, MIB, lambda offset, length: chain[-1].read_buffer_at_offset(length, offset))


def read(peer, disk_format, target, where, *images):
    paths = [Path(word).resolve() for word in images]
    peers = {"dissect": dissect, "libvhdi": libvhdi, "libvmdk": libvmdk}
    device = peers[peer](disk_format, paths)
    if where == "all":
        ranges = [(0, device.size)]
    else:
        ranges = [tuple(int(number) for number in part.split(":")) for part in where.split(",")]
    with open(target, "wb") as file:
        for offset, length in ranges:
            for at in range(offset, offset + length, 16 * MIB):
                file.write(device.read(at, min(16 * MIB, offset + length - at)))
    return device.size


def answer(words):
    try:
        return f"size\t{read(*words)}"
    except Exception:
        return f"error\t{traceback.format_exc()!r}"


def main():
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            print(answer(line.rstrip("\n").split("\t")), flush=True)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status != 0:
            print(f"error\tthe reader ended with status {status}", flush=True)


main()
