"""Rounds in which all methods run in turn, and their measurements."""

import os
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

from live.lab import Problem
from report import table

# If the host takes more of the processors than this, the figures are not usable (steal time).
STOLEN_MAX = 0.10
ATTEMPT_COUNT_MAX = 3


@dataclass
class Series:
    """One measurement: figures by method and round."""

    title: str
    note: str
    columns: dict  # name of a figure: (its title, how to format a value)
    rounds: dict = field(default_factory=dict)
    problems: dict = field(default_factory=dict)

    def add(self, way, figures):
        self.rounds.setdefault(way, []).append(figures)

    def fail(self, way, problem):
        self.rounds.setdefault(way, [])
        self.problems.setdefault(way, []).append(str(problem))

    def values(self, way, figure):
        return [figures[figure] for figures in self.rounds.get(way, []) if figures.get(figure) is not None]

    def median(self, way, figure):
        values = self.values(way, figure)
        return statistics.median(values) if values else None

    def text(self):
        """The medians as a table, with minimum and maximum of the first figure."""
        first = next(iter(self.columns))
        columns = {**self.columns, "stolen": ("stolen", share)}
        rows = []
        for way in self.rounds:
            values = self.values(way, first)
            if not values:
                rows.append([way, f"not done: {self.problems.get(way, ['?'])[0].splitlines()[0][:70]}", *["-"] * len(columns)])
                continue
            show = columns[first][1]
            row = [way, show(self.median(way, first)), f"{show(min(values))} - {show(max(values))}"]
            for figure, (_, shown) in list(columns.items())[1:]:
                value = self.median(way, figure)
                row.append("-" if value is None else shown(value))
            rows.append(row)
        titles = [title for title, _ in columns.values()]
        text = f"### {self.title}\n\n{table([' ', titles[0], 'min - max', *titles[1:]], rows)}\n\n{self.note}\n"
        lines = [f"- {way}: {len(problems)} not done: {problems[0].splitlines()[0]}" for way, problems in self.problems.items()]
        return text + ("\n" + "\n".join(lines) + "\n" if lines else "")

    def document(self):
        return {"title": self.title, "ways": self.rounds, "problems": self.problems}


@dataclass(frozen=True)
class Goal:
    """The goal for a figure, and its value."""

    what: str
    wanted: str
    value: float | None
    shown: str
    is_reached: bool

    @property
    def outcome(self):
        return "MISSING" if self.value is None else "PASS" if self.is_reached else "FAIL"


def at_most(what, value, limit, show):
    """The goal that a figure does not exceed a limit."""
    shown = "-" if value is None else show(value)
    return Goal(what, f"<= {show(limit)}", value, shown, value is not None and value <= limit)


def goals_table(goals):
    rows = [[goal.what, goal.shown, goal.wanted, goal.outcome] for goal in goals]
    return table(["goal", "measured", "wanted", "verdict"], rows)


class Quiet:
    """Waits while the host of this virtual machine takes processor time from it, with a total time limit."""

    def __init__(self, patience_s, say):
        self.patience_s, self.say = patience_s, say

    def wait(self):
        while self.patience_s > 0 and stolen_in(lambda: time.sleep(1))[1] > STOLEN_MAX:
            self.patience_s -= 1

    def measure(self, way):
        """The figures of a method, and the steal time during it; repeated if the steal time was too high."""
        for attempt in range(ATTEMPT_COUNT_MAX):
            self.wait()
            figures, stolen = stolen_in(way)
            if stolen <= STOLEN_MAX or self.patience_s <= 0:
                break
            self.say(f"    {stolen:.0%} of the processors were stolen: once more")
        return {**figures, "stolen": stolen}


def stolen_in(way):
    """The result of a function, and the share of processor time that the host took during it."""
    before, start = stolen_seconds(), time.perf_counter()
    result = way()
    return result, (stolen_seconds() - before) / (time.perf_counter() - start) / os.cpu_count()


def stolen_seconds():
    return int(Path("/proc/stat").read_text().split(None, 9)[8]) / os.sysconf("SC_CLK_TCK")


def take_turns(series, ways, round_count, quiet):
    """Calls each method once per round, and records its figures; each round begins with another method."""
    names = list(ways)
    say = quiet.say
    for number in range(round_count):
        for name in names[number % len(names):] + names[: number % len(names)]:
            try:
                figures = quiet.measure(ways[name])
            except (Problem, RuntimeError) as problem:
                series.fail(name, problem)
                say(f"    {name}: NOT DONE: {problem}")
                continue
            series.add(name, figures)
            first, (_, show) = next(iter(series.columns.items()))
            say(f"    round {number + 1}: {name:<58} {show(figures[first]):>12}")
    # In the order of the names, not in the order of the first results.
    series.rounds = {name: series.rounds.get(name, []) for name in names}


def milliseconds(value):
    return f"{value:.1f} ms" if value < 100 else f"{value:.0f} ms"


def seconds(value):
    return f"{value:.2f} s"


def share(value):
    return f"{value:.0%}"


def megabytes(value):
    return f"{value / 1e6:.2f} MB"


def number(value):
    return f"{value:.0f}"
