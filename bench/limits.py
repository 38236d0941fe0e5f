"""The slowest step of each job: a lower bound of the time that any program needs on this machine."""

import json

import process


def measure(bench_program, sample, scratch):
    """Bytes per second of the single steps (crates/repo/benches/limits.rs)."""
    log = scratch / "limits.log"
    log.unlink(missing_ok=True)
    process.run([bench_program, sample, scratch], None, scratch, log, 300)
    text = log.read_text()
    return json.loads(text[text.index("{") :])


def slowest(job, disks, results, rates):
    """Name and seconds of the slowest step of a job of Holdfast, on all processors; None if it is not known.

    This is deliberately a lower bound: it includes no metadata, no key derivation and no waiting, and counts nothing
    twice.
    """
    if rates is None:
        return None
    day0, day1, day2 = (disks[name] for name in ("day0.raw", "day1.raw", "day2.raw"))
    ours = results[job.name].get("holdfast")
    if job.action == "backup":
        disk = disks.get(job.disk)
        if disk is None:
            return None
        written = ours.median(lambda run: run.figures["added_bytes"]) if ours else None
        new = 0 if job.reread else disk["new_bytes"]
        if job.name == "second":
            new = 0  # nearly all of its data is known
        steps = {
            "reading the disk": disk["nonzero_bytes"] / rates["read_page_cache"]["all"],
            "BLAKE3 of its blocks": disk["nonzero_bytes"] / rates["blake3"]["all"],
            "zstd of what is new": new / rates["zstd_compress"]["all"],
            "AES-GCM": (written or 0) / rates["aes_256_gcm_seal"]["all"],
            "writing and syncing": (written or 0) / rates["write_fsync"]["all"],
        }
    else:
        if not ours or not ours.runs:
            return None
        stored = ours.median(lambda run: run.figures["repository_bytes"])
        everything = day0["new_bytes"] + day1["new_bytes"] + day2["new_bytes"]
        restoring = job.action == "restore"
        decoded = min(day2["nonzero_bytes"], everything) if restoring else everything
        steps = {
            "reading the repository": stored * decoded / everything / rates["read_page_cache"]["all"],
            "AES-GCM": stored * decoded / everything / rates["aes_256_gcm_open"]["all"],
            "decompressing": decoded / rates["zstd_decompress"]["all"],
            "BLAKE3 of the blocks": decoded / rates["blake3"]["all"],
            "writing the disk": day2["nonzero_bytes"] / rates["write_page_cache"]["all"] if restoring else 0,
        }
    name = max(steps, key=steps.get)
    return name, steps[name]
