"""Conversion between disk image formats, compared with qemu-img; qemu-img also compares every result with its source.

A conversion by Holdfast is durable when it returns. qemu-img leaves that to the kernel, so its results are synced
within the measured time. One column shows the time without sync.
"""

import os
import shutil
import subprocess
from pathlib import Path

import process
import sparse
from jobs import Result
from process import Failed

CONVERSIONS = {
    "raw-to-qcow2": "convert day0: raw to qcow2",
    "qcow2-to-raw": "convert day0: qcow2 to raw",
    "raw-to-zlib": "convert day0: raw to compressed qcow2 (zlib)",
    "raw-to-zstd": "convert day0: raw to compressed qcow2 (zstd)",
}
COMPRESSIONS = {"raw-to-zlib": "zlib", "raw-to-zstd": "zstd"}

# Shown, but not compared.
NOT_DURABLE = "qemu-img -W, not synced"


def holdfast_command(holdfast, conversion, source, target):
    """Holdfast's command for a conversion; raises Failed if the program has none."""
    if not holdfast.has_verb("image", "convert"):
        raise Failed("holdfast has no verb image convert")
    compression = COMPRESSIONS.get(conversion)
    return [
        *(holdfast.binary, "image", "convert", "--no-progress", source, target),
        *("--to", "raw" if conversion == "qcow2-to-raw" else "qcow2"),
        *(["--compress", "--compression", compression] if compression else []),
    ]


def qemu_command(options, conversion, source, target):
    formats = ["-f", "qcow2", "-O", "raw"] if conversion == "qcow2-to-raw" else ["-f", "raw", "-O", "qcow2"]
    compression = COMPRESSIONS.get(conversion)
    compressed = ["-c", "-o", f"compression_type={compression}"] if compression else []
    return ["qemu-img", "convert", *options, *formats, *compressed, source, target]


def synced(command):
    return process.then_synced(command, Path(command[-1]).parent)


def measure(disks, folder, holdfast, run_count, timeout_s, say):
    """Results by conversion and program. `qemu-img -W` writes out of order, with 16 simultaneous requests."""
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "log"
    env = {**os.environ, "LC_ALL": "C.UTF-8"}
    raw, qcow2 = disks / "day0.raw", folder / "source.qcow2"
    programs = {
        "holdfast": lambda *words: holdfast_command(holdfast, *words),
        "qemu-img": lambda *words: synced(qemu_command([], *words)),
        "qemu-img -W": lambda *words: synced(qemu_command(["-m", "16", "-W"], *words)),
        "qemu-img -W -t none": lambda *words: synced(qemu_command(["-m", "16", "-W", "-t", "none"], *words)),
        NOT_DURABLE: lambda *words: qemu_command(["-m", "16", "-W"], *words),
    }
    results = {conversion: {name: Result() for name in programs} for conversion in CONVERSIONS}
    if not shutil.which("qemu-img"):
        for by_program in results.values():
            for result in by_program.values():
                result.problem, result.is_missing = "qemu-img is missing (apt install qemu-utils)", True
        return results
    process.run(qemu_command([], "raw-to-qcow2", raw, qcow2), env, folder, log, timeout_s)
    for conversion, title in CONVERSIONS.items():
        say(f"  {title}")
        source = qcow2 if conversion == "qcow2-to-raw" else raw
        for number in range(1, run_count + 1):
            for name, command_of in programs.items():
                result = results[conversion][name]
                if result.problem:
                    continue
                target = folder / "converted"
                target.unlink(missing_ok=True)
                sparse.warm(source)
                os.sync()
                try:
                    command = command_of(conversion, source, target)
                    run = process.run(command, env, folder, log, timeout_s)
                    compare(conversion, source, target)
                except Failed as failure:
                    result.problem = str(failure)
                    result.is_missing = "has no verb" in result.problem
                    say(f"    {name:<24} {'MISSING' if result.is_missing else 'NOT DONE'}: {failure}")
                    continue
                run.figures["target_bytes"] = sparse.allocated_bytes(target)
                result.runs.append(run)
                say(
                    f"    {name:<24} run {number}: {run.wall_s:8.2f} s  cpu {run.cpu_s:8.2f} s  "
                    f"{run.rss_bytes / 2**20:7.0f} MiB  {run.figures['target_bytes'] / 1e6:9.2f} MB"
                )
    shutil.rmtree(folder)
    return results


def compare(conversion, source, target):
    formats = ("qcow2", "raw") if conversion == "qcow2-to-raw" else ("raw", "qcow2")
    commands = [["qemu-img", "compare", "-f", formats[0], "-F", formats[1], source, target]]
    if formats[1] == "qcow2":
        commands.append(["qemu-img", "check", "-f", "qcow2", target])
    for command in commands:
        answer = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
        if answer.returncode != 0:
            raise Failed(f"{Path(command[0]).name} {command[1]}: {(answer.stdout + answer.stderr).strip()}")
