#!/usr/bin/python3
"""holdfast of the other host, of which a process is killed at a request about a machine.

The file PLAN holds "REQUEST WHEN VICTIM": at the next request of this name, the victim is killed "before" the program gets it, or
"after" it has answered, and the answer is lost. The victim is the "program" or the "sender". docs/format/migration.md has the
requests.
"""

import json
import os
import signal
import subprocess
import sys

PROGRAM, PLAN = "@PROGRAM@", "@PLAN@"


def arguments(process):
    with open(f"/proc/{process}/cmdline", "rb") as line:
        return line.read().split(b"\0")


def sender():
    process = os.getppid()
    while b"migrate" not in arguments(process):
        with open(f"/proc/{process}/stat", encoding="utf-8", errors="replace") as stat:
            process = int(stat.read().rsplit(")", 1)[1].split()[1])
    return process


def main():
    service = sys.stdin.buffer.readline()
    program = subprocess.Popen([PROGRAM, *sys.argv[1:]], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
    program.stdin.write(service)
    if json.loads(service)["service"] != "machine":
        forward(program)

    def end(victim):
        with open(PLAN, "w", encoding="ascii") as plan:
            plan.write("none now none")
        if victim == "sender":
            os.kill(sender(), signal.SIGKILL)
            program.stdin.close()
            os._exit(program.wait())
        program.send_signal(signal.SIGKILL)
        os._exit(1)

    for line in sys.stdin.buffer:
        with open(PLAN, encoding="ascii") as plan:
            request, when, victim = plan.read().split()
        is_last = json.loads(line)["request"] == request
        if is_last and when == "before":
            end(victim)
        program.stdin.write(line)
        answer = b""
        while not answer.endswith(b"\n"):
            if not (part := program.stdout.read(65536)):
                os._exit(program.wait() or 1)
            answer += part
        if is_last:
            end(victim)
        sys.stdout.buffer.write(answer)
        sys.stdout.buffer.flush()
    program.stdin.close()
    os._exit(program.wait())


def forward(program):
    if os.fork() == 0:
        program.stdin.close()
        while data := program.stdout.read(65536):
            os.write(1, data)
        os._exit(0)
    os.close(1)
    while data := sys.stdin.buffer.read1(65536):
        program.stdin.write(data)
    program.stdin.close()
    program.wait()
    os._exit(0)


main()
