"""Sparse files: their data ranges, and comparison of two files; holes are never read."""

import os

WINDOW_BYTES = 1 << 20
ZEROS = bytes(WINDOW_BYTES)


def data_extents(path):
    """The ranges (start, end) of a file with data, in order."""
    extents = []
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        at = 0
        while at < size:
            try:
                start = os.lseek(file.fileno(), at, os.SEEK_DATA)
            except OSError:
                break
            at = os.lseek(file.fileno(), start, os.SEEK_HOLE)
            extents.append((start, at))
    return extents


def allocated_bytes(path):
    return os.stat(path).st_blocks * 512


def warm(path):
    """Reads a file's data once, so that it is in the page cache."""
    with open(path, "rb", buffering=0) as file:
        buffer = memoryview(bytearray(WINDOW_BYTES))
        for start, end in data_extents(path):
            file.seek(start)
            left = end - start
            while left > 0:
                count = file.readinto(buffer[: min(left, WINDOW_BYTES)])
                if not count:
                    break
                left -= count


def windows(paths):
    """The offset of each window of WINDOW_BYTES in which at least one of the files has data."""
    numbers = set()
    for path in paths:
        for start, end in data_extents(path):
            numbers.update(range(start // WINDOW_BYTES, (end + WINDOW_BYTES - 1) // WINDOW_BYTES))
    return (number * WINDOW_BYTES for number in sorted(numbers))


def first_difference(one, other):
    """Offset of the first window in which two files differ; None if they are equal."""
    if os.path.getsize(one) != os.path.getsize(other):
        return min(os.path.getsize(one), os.path.getsize(other))
    with open(one, "rb", buffering=0) as a, open(other, "rb", buffering=0) as b:
        for offset in windows([one, other]):
            if os.pread(a.fileno(), WINDOW_BYTES, offset) != os.pread(b.fileno(), WINDOW_BYTES, offset):
                return offset
    return None
