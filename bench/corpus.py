"""The disks to measure with: built by scripts/make-corpus if they are missing, and cut to a slice if requested."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import sparse

MIB = 1 << 20
BLOCK_BYTES = 4096
ZERO_BLOCK = bytes(BLOCK_BYTES)
# The 256 MiB pieces of each disk in the slice: system, database, system, a hole.
SLICE_PIECES = (0, 6, 8, 13)
SLICE_PIECE_BYTES = 256 * MIB
DISKS = ("day0.raw", "day1.raw", "day2.raw", "second.raw")


def default_folder():
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("HOLDFAST_CORPUS") or Path(cache) / "holdfast-corpus")


def find_or_build(root, folder, size, say):
    """The folder with the disks of a size (small, slice or full)."""
    whole = "small" if size == "small" else "full"
    # A folder that contains the disks is used as it is; otherwise it has a subfolder for each size.
    place = folder if (folder / "day2.raw").exists() else folder / whole
    if not (place / "day2.raw").exists():
        build(root, place, whole, say)
    return cut(place, folder / "slice", say) if size == "slice" else place


def build(root, place, whole, say):
    say(f"building the {whole} corpus in {place} (once)")
    command = [root / "scripts/make-corpus", "--second", "--force", *(["--small"] if whole == "small" else []), place]
    answer = subprocess.run(list(map(str, command)), check=False)
    if answer.returncode != 0:
        hint = "" if whole == "small" else " (the full one needs root, debootstrap and loop devices; or try --small)"
        raise SystemExit(f"bench: the corpus could not be built{hint}")


def cut(whole, place, say):
    """Creates the 1 GiB slice of the full disks. It has no second machine, whose layout differs."""
    place.mkdir(parents=True, exist_ok=True)
    for disk in DISKS[:3]:
        target = place / disk
        if target.exists() and target.stat().st_mtime >= (whole / disk).stat().st_mtime:
            continue
        say(f"cutting the slice of {disk}")
        unfinished = target.with_suffix(".new")
        with open(whole / disk, "rb") as source, open(unfinished, "wb") as sliced:
            sliced.truncate(len(SLICE_PIECES) * SLICE_PIECE_BYTES)
            for number, piece in enumerate(SLICE_PIECES):
                for offset in range(0, SLICE_PIECE_BYTES, MIB):
                    source.seek(piece * SLICE_PIECE_BYTES + offset)
                    window = source.read(MIB)
                    if window != sparse.ZEROS[: len(window)]:
                        sliced.seek(number * SLICE_PIECE_BYTES + offset)
                        sliced.write(window)
        unfinished.rename(target)
    return place


def describe(place):
    """Sizes of the disks and of the new data in each, for the report and for the limits.

    Runs in a separate process: the set of all blocks is large, and the peak memory of this process would count as
    memory of every program that it starts later.
    """
    command = [sys.executable, "-B", __file__, str(place)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def measure_disks(place):
    disks = {}
    seen = set()
    for name in DISKS:
        path = place / name
        if not path.exists():
            continue
        nonzero = new = 0
        with open(path, "rb", buffering=0) as file:
            for offset in sparse.windows([path]):
                window = os.pread(file.fileno(), MIB, offset)
                for at in range(0, len(window), BLOCK_BYTES):
                    block = window[at : at + BLOCK_BYTES]
                    if block == ZERO_BLOCK:
                        continue
                    nonzero += len(block)
                    digest = hashlib.sha1(block, usedforsecurity=False).digest()[:10]
                    if digest not in seen:
                        seen.add(digest)
                        new += len(block)
        disks[name] = {
            "virtual_bytes": path.stat().st_size,
            "allocated_bytes": sparse.allocated_bytes(path),
            "nonzero_bytes": nonzero,
            "new_bytes": new,
        }
    return disks


if __name__ == "__main__":
    print(json.dumps(measure_disks(Path(sys.argv[1]))))
