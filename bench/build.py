"""Builds the release program from this repository, and describes the revision."""

import json
import os
import subprocess
from pathlib import Path

import process

ROOT = Path(__file__).resolve().parent.parent


def cargo(*words):
    """Builds a part of this repository; returns the resulting programs by name."""
    env = {**os.environ, "PATH": f"{os.environ['PATH']}:{Path.home()}/.cargo/bin"}
    command = ["cargo", *words, "--locked", "--message-format=json-render-diagnostics"]
    try:
        answer = subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True, check=False)
    except FileNotFoundError:
        raise SystemExit("bench: cargo is not installed: get it from https://rustup.rs") from None
    if answer.returncode != 0:
        raise SystemExit(f"bench: cargo {' '.join(words)} did not succeed")
    built = (json.loads(line) for line in answer.stdout.splitlines() if line.startswith("{"))
    return {
        message["target"]["name"]: Path(message["executable"])
        for message in built
        if message.get("reason") == "compiler-artifact" and message.get("executable")
    }


def revision():
    text = process.first_line(["git", "-C", str(ROOT), "describe", "--always", "--dirty"])
    return f"revision {text}" if text else "revision unknown"
