"""Describes the machine on which the measurements were made."""

import os
import platform
import time
from pathlib import Path


def describe(scratch):
    return {
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "cpu": cpu(),
        "threads": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "system": system(),
        "file_system": file_system(scratch),
        "load_average_at_start": [round(load, 2) for load in os.getloadavg()],
    }


def cpu():
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def system():
    for line in Path("/etc/os-release").read_text().splitlines():
        if line.startswith("PRETTY_NAME="):
            return line.partition("=")[2].strip('"')
    return platform.system()


def file_system(path):
    """The type of the file system of `path`."""
    path = str(Path(path).resolve())
    best = ("", "unknown")
    for line in Path("/proc/mounts").read_text().splitlines():
        _, place, kind, *_ = line.split()
        inside = path == place or path.startswith(place.rstrip("/") + "/")
        if inside and len(place) >= len(best[0]):
            best = (place, kind)
    return best[1]
