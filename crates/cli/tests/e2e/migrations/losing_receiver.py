#!/usr/bin/python3
"""holdfast of the other host, whose connection is lost at a request about a container.

The file PLAN holds "REQUEST WHEN": at the next request of this name, the program is killed before it gets it, or after it has
answered, and the answer is lost. docs/format/migration.md has the requests.
"""

import json
import os
import signal
import subprocess
import sys

PROGRAM, PLAN = "@PROGRAM@", "@PLAN@"


def main():
    if sys.argv[1] != "receive-container":
        os.execv(PROGRAM, ["holdfast", *sys.argv[1:]])
    program = subprocess.Popen([PROGRAM, *sys.argv[1:]], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def end():
        with open(PLAN, "w", encoding="ascii") as plan:
            plan.write("none now")
        program.send_signal(signal.SIGKILL)
        os._exit(1)

    for line in sys.stdin.buffer:
        with open(PLAN, encoding="ascii") as plan:
            request, when = plan.read().split()
        is_last = json.loads(line)["request"] == request
        if is_last and when == "before":
            end()
        program.stdin.write(line)
        program.stdin.flush()
        answer = program.stdout.readline()
        if is_last:
            end()
        sys.stdout.buffer.write(answer)
        sys.stdout.buffer.flush()


main()
