"""The results as tables, for the terminal and for a Markdown file."""

from goals import FIGURES, judge, judge_memory
from images import CONVERSIONS
from jobs import JOBS
from reads import READ_COUNT, percentiles

MIB = 1 << 20
FIGURE_TITLES = {
    "wall": "wall time",
    "stored": "bytes stored",
    "added": "bytes added",
    "p50": "median read",
    "p95": "95th percentile read",
    "memory": "largest process",
}
TITLES = {
    **{job.name: job.title for job in JOBS},
    **CONVERSIONS,
    "reads": f"{READ_COUNT} reads of 1 MiB at random places of day2",
    "synthetic first": "10 TiB with little data: first backup",
    "synthetic unchanged": "10 TiB with little data: unchanged",
    "synthetic restore": "10 TiB with little data: restore",
    "synthetic verify": "10 TiB with little data: verify",
}


def table(header, rows):
    """A Markdown table that is also readable as text: columns are padded, figures are right-aligned."""
    cells = [header, *rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    right = [column > 0 for column in range(len(header))]

    def line(row):
        padded = (
            cell.rjust(width) if is_right else cell.ljust(width)
            for cell, width, is_right in zip(row, widths, right)
        )
        return "| " + " | ".join(padded) + " |"

    rule = "|" + "|".join("-" * (width + 1) + (":" if is_right else "-") for width, is_right in zip(widths, right)) + "|"
    return "\n".join([line(header), rule, *map(line, rows)])


def seconds(value):
    return "-" if value is None else f"{value:.2f}" if value < 100 else f"{value:.0f}"


def megabytes(value):
    return "-" if value is None else f"{value / 1e6:.2f}"


def ratio(ours, other):
    return f"{ours / other:.2f}" if ours is not None and other else "-"


def job_table(job, by_program, limit=None):
    """The results of all programs for a job; `limit` is the name and the seconds of its slowest step."""
    ours = by_program.get("holdfast")
    our_wall = ours.median(FIGURES["wall"]) if ours else None
    our_cpu = ours.median(FIGURES["cpu"]) if ours else None
    keeps_bytes = job in {job.name for job in JOBS} or job.startswith("synthetic")
    rows = []
    for name, result in by_program.items():
        if result.problem or not result.runs:
            state = "missing" if result.is_missing else "not done"
            rows.append([name, f"{state}: {brief(result.problem)}", *["-"] * 7])
            continue
        wall = result.median(FIGURES["wall"])
        low, high = result.spread(FIGURES["wall"])
        target = result.median(lambda run: run.figures.get("target_bytes"))
        size = result.median(FIGURES["added"]) if keeps_bytes and target is None else target
        rows.append([
            name,
            f"{seconds(wall)} s",
            f"{seconds(low)} - {seconds(high)}",
            f"{seconds(result.median(FIGURES['cpu']))} s",
            f"{max(run.rss_bytes for run in result.runs) / MIB:.0f} MiB",
            megabytes(size),
            "" if name == "holdfast" else ratio(our_wall, wall),
            "" if name == "holdfast" else ratio(our_cpu, result.median(FIGURES["cpu"])),
            f"{max(run.others_share for run in result.runs):.0%}",
        ])
    size_title = "MB of the target" if job in ("restore", *CONVERSIONS) or job.endswith("restore") else "MB added"
    header = ["program", "wall", "min - max", "CPU", "memory", size_title, "ours / it", "by CPU", "others' CPU"]
    text = f"### {TITLES[job]}\n\n{table(header, rows)}\n"
    if limit and our_wall:
        step, limit_s = limit
        text += f"\nSlowest step: {step}, {limit_s:.2f} s on this machine; ours takes {our_wall / limit_s:.1f} times that.\n"
    return text


def reads_table(by_program):
    rows = []
    for name, result in by_program.items():
        if result.problem or not result.runs:
            rows.append([name, f"{'missing' if result.is_missing else 'not done'}: {brief(result.problem)}", *["-"] * 3])
            continue
        p50, p95 = percentiles(result.runs)
        ready = result.median(lambda run: run.figures["open_ms"])
        rows.append([
            name,
            f"{p50:.2f} ms",
            f"{p95:.2f} ms",
            f"{ready:.0f} ms",
            f"{max(run.rss_bytes for run in result.runs) / MIB:.0f} MiB",
        ])
    return f"### {TITLES['reads']}\n\n{table(['program', 'p50', 'p95', 'ready after', 'memory'], rows)}\n"


def brief(problem):
    return problem.splitlines()[0][:90].replace("|", "/") if problem else "a job before it did not succeed"


def verdict_rows(verdicts):
    def show(verdict, value):
        if value is None:
            return "-"
        if verdict.figure == "memory":
            return f"{value / MIB:.0f} MiB"
        if verdict.figure in ("stored", "added"):
            return f"{megabytes(value)} MB"
        return f"{value:.2f} ms" if verdict.figure.startswith("p") else f"{seconds(value)} s"

    return [
        [
            f"{verdict.job}: {FIGURE_TITLES[verdict.figure]}",
            show(verdict, verdict.ours),
            f"{show(verdict, verdict.best)} {verdict.best_peer}".strip(),
            "-" if verdict.ratio is None else f"{verdict.ratio:.2f}",
            verdict.goal,
            verdict.outcome,
        ]
        for verdict in verdicts
    ]


def goals_table(verdicts):
    return table(["goal", "ours", "best peer", "ratio", "wanted", "verdict"], verdict_rows(verdicts))


def verdicts_of(results, selected):
    return judge(results, selected) + judge_memory(results)


def limits_table(rates):
    rows = [
        [name.replace("_", " "), f"{rate['one'] / 1e6:,.0f}", f"{rate['all'] / 1e6:,.0f}"]
        for name, rate in rates.items()
        if isinstance(rate, dict)
    ]
    return table(["step, MB/s", "one thread", f"{rates['threads']} threads"], rows)


def machine_lines(machine, versions, corpus_text):
    lines = [
        f"- {machine['date']}; {machine['cpu']}, {machine['threads']} threads, "
        f"{machine['memory_bytes'] / 2**30:.0f} GiB; {machine['system']}, kernel {machine['kernel']}, "
        f"{machine['file_system']}",
        f"- load average before: {machine['load_average_at_start']}, after: {machine['load_average_at_end']}; "
        f"a program that does nothing counts as {machine['memory_floor_bytes'] / MIB:.0f} MiB",
        f"- {corpus_text}",
    ]
    lines += [f"- {name}: {text}" for name, text in versions.items()]
    return "\n".join(lines)


def markdown(record):
    """The whole report. `record` is the data that bench/run has collected."""
    parts = ["# Measurements", machine_lines(record.machine, record.versions, record.corpus_text)]
    parts += ["## Goals", goals_table(record.verdicts)]
    parts += ["## Jobs", f"Medians of {record.run_count} runs, programs in turn; ratios are ours / theirs."]
    for job, by_program in record.results.items():
        text = reads_table(by_program) if job == "reads" else job_table(job, by_program, record.limits.get(job))
        parts.append(text.rstrip())
    if record.rates:
        parts += ["## What this machine can do", limits_table(record.rates)]
    if record.references:
        rows = [[name, f"{seconds(run.wall_s)} s", f"{seconds(run.cpu_s)} s"] for name, run in record.references.items()]
        parts += ["## Simple programs, for comparison", table(["command", "wall", "CPU"], rows)]
    return "\n\n".join(parts) + "\n"


def document(record):
    """The report as JSON, for programs."""
    return {
        "schema": 1,
        "machine": record.machine,
        "programs": record.versions,
        "corpus": {"size": record.size, "disks": record.disks},
        "run_count": record.run_count,
        "primitives_bytes_per_s": record.rates,
        "limits": {job: {"step": name, "seconds": limit_s} for job, (name, limit_s) in record.limits.items()},
        "jobs": {
            job: {
                name: {"problem": result.problem or None, "runs": [run.as_dict() for run in result.runs]}
                for name, result in by_program.items()
            }
            for job, by_program in record.results.items()
        },
        "references": {name: run.as_dict() for name, run in record.references.items()},
        "goals": [
            {
                "job": verdict.job,
                "figure": verdict.figure,
                "ours": verdict.ours,
                "best_peer": verdict.best_peer or None,
                "best": verdict.best,
                "ratio": verdict.ratio,
                "wanted": verdict.goal,
                "outcome": verdict.outcome,
            }
            for verdict in record.verdicts
        ],
    }
