"""Runs one program and measures it: wall time, CPU time, memory of the largest process, and the load by other
processes.
"""

import os
import signal
import subprocess
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


class Failed(Exception):
    """A program failed."""


@dataclass
class Run:
    """The cost of one run of a program."""

    wall_s: float
    cpu_s: float  # user and system, children included
    rss_bytes: int  # of the largest process, children included
    others_share: float  # share of all processors that other processes used meanwhile
    figures: dict = field(default_factory=dict)  # added by the job: bytes of the repository, of the target

    def as_dict(self):
        return {
            "wall_s": round(self.wall_s, 4),
            "cpu_s": round(self.cpu_s, 4),
            "rss_bytes": self.rss_bytes,
            "others_share": round(self.others_share, 3),
            **self.figures,
        }


def busy_seconds():
    """CPU seconds of all processors since the machine was started."""
    fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    user, nice, system, _idle, _iowait, irq, softirq, _steal = map(int, fields)
    return (user + nice + system + irq + softirq) / TICKS_PER_SECOND


def then_synced(command, path):
    """`command`, followed by a sync of the file system of `path`, so that the result survives a power cut."""
    return ["sh", "-c", 'path=$1; shift; "$@" && sync -f "$path"', "sh", path, *command]


def run(command, env, cwd, log, timeout_s):
    """Runs `command` until it ends, with its output in `log`. Raises Failed on a non-zero exit code and on a
    timeout.
    """
    with open(log, "ab") as output:
        output.write(f"\n$ {' '.join(map(str, command))}\n".encode())
        output.flush()
        begin = output.tell()
        busy = busy_seconds()
        started = time.perf_counter()
        try:
            process = subprocess.Popen(
                [str(word) for word in command],
                env=env,
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise Failed(f"{command[0]} does not start: {error}") from error
        overdue = threading.Event()

        def stop():
            overdue.set()
            os.killpg(process.pid, signal.SIGKILL)

        timer = threading.Timer(timeout_s, stop)
        timer.start()
        try:
            _, status, usage = os.wait4(process.pid, 0)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            os.wait4(process.pid, 0)
            raise
        finally:
            timer.cancel()
            process.returncode = 0  # already waited for: this keeps subprocess from waiting again
        wall_s = time.perf_counter() - started
    if overdue.is_set():
        raise Failed(f"took longer than {timeout_s:.0f} s: {' '.join(map(str, command))}")
    code = os.waitstatus_to_exitcode(status)
    if code != 0:
        raise Failed(f"exit code {code}: {' '.join(map(str, command))}\n{tail(log, begin)}")
    cpu_s = usage.ru_utime + usage.ru_stime
    others = max(0.0, busy_seconds() - busy - cpu_s) / (wall_s * os.cpu_count())
    return Run(wall_s, cpu_s, usage.ru_maxrss * 1024, min(others, 1.0))


def tail(log, begin):
    """The last lines that a program wrote to its log since `begin`."""
    with open(log, "rb") as output:
        output.seek(begin)
        lines = output.read().decode(errors="replace").strip().splitlines()
    return "\n".join("    " + line for line in lines[-6:])


def first_line(command, env=None):
    """First line of the output of a short command; None if it fails."""
    try:
        answer = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = (answer.stdout + answer.stderr).strip().splitlines()
    return lines[0].strip() if answer.returncode == 0 and lines else None
