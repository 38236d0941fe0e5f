#!/usr/bin/python3
"""holdfast of the other host, whose connections of disks that are pulled stop or break.

The file PLAN holds "ACTION BYTES": "pass" forwards everything. "hold" forwards BYTES from the source, and then nothing while the plan
says so. "break" ends the next connection after BYTES, and changes the plan to "pass". docs/format/migration.md has the services.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time

PROGRAM, PLAN = "@PROGRAM@", "@PLAN@"


def plan():
    with open(PLAN, encoding="ascii") as text:
        action, count = text.read().split()
    return action, int(count)


def main():
    if sys.argv[1] != "receive-migration":
        os.execv(PROGRAM, ["holdfast", *sys.argv[1:]])
    program = subprocess.Popen([PROGRAM, *sys.argv[1:]], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def answer():
        while data := os.read(program.stdout.fileno(), 65536):
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()
        os._exit(program.wait())

    threading.Thread(target=answer).start()
    line = sys.stdin.buffer.readline()
    assert json.loads(line)["service"] == "client", line
    program.stdin.write(line)
    program.stdin.flush()
    sent = 0
    while data := sys.stdin.buffer.read1(65536):
        while plan()[0] == "hold" and sent >= plan()[1]:
            time.sleep(0.02)
        action, count = plan()
        if action == "break" and sent >= count:
            with open(PLAN + "-next", "w", encoding="ascii") as text:
                text.write("pass 0")
            os.rename(PLAN + "-next", PLAN)
            program.send_signal(signal.SIGKILL)
            os._exit(1)
        program.stdin.write(data)
        program.stdin.flush()
        sent += len(data)
    program.stdin.close()


main()
