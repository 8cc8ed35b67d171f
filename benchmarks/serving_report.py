"""What a run found, as JSON, as tables and as a plot."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from serving_cases import Case

_FIGURES = ("sequences_per_s", "p50_ms", "p99_ms", "cpu_us_per_sequence")
Figures = Mapping[str, float]


def environment() -> dict[str, Any]:
    """The machine and the versions that matter."""
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return {
        "cpu": names[0] if names else platform.machine(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in ("torch", "grpcio", "qrnn-serve")},
    }


def summary(
    case: Case,
    engine: Sequence[float],
    rounds: Mapping[str, Sequence[Figures]],
    failures: Mapping[str, str],
    *,
    ours: str,
) -> dict[str, Any]:
    """Medians and spreads of a case, and how far this server is ahead.

    Args:
        case: What was measured.
        engine: Sequences a second without a server, of each round.
        rounds: The figures of each server in each round.
        failures: Why a server has none.
        ours: Which server is this project's.
    """
    servers = {
        name: {figure: _spread([r[figure] for r in found]) for figure in _FIGURES}
        for name, found in rounds.items()
        if name not in failures
    }
    result: dict[str, Any] = {
        "name": case.name,
        "rows": case.rows,
        "callers": case.callers,
        "engine_sequences_per_s": _spread(engine),
        "servers": servers,
        "failures": dict(failures),
    }
    if ours in servers:
        rates = {name: [r["sequences_per_s"] for r in rounds[name]] for name in servers}
        result["over_engine"] = _ratio(rates[ours], engine)
        peers = {name: statistics.median(rates[name]) for name in servers if name != ours}
        if peers:
            best = max(peers, key=lambda name: peers[name])
            result["best_peer"] = best
            result["over_best_peer"] = _ratio(rates[ours], rates[best])
    result["text"] = _case_text(result)
    return result


def write_report(results: dict[str, Any], stem: Path) -> list[Path]:
    """Write STEM.json, .md and, with matplotlib, .png; returns what was written."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    written = [stem.with_name(f"{stem.name}.json"), stem.with_name(f"{stem.name}.md")]
    written[0].write_text(json.dumps(_rounded(results), indent=1) + "\n")
    written[1].write_text(tables(results))
    if importlib.util.find_spec("matplotlib") is None:
        print("no plot: matplotlib is not installed (pip install matplotlib)")
    else:
        written.append(stem.with_name(f"{stem.name}.png"))
        _draw(results, written[-1])
    return written


def tables(results: Mapping[str, Any]) -> str:
    """The run as Markdown."""
    machine = results["environment"]
    names = [name for name in results["servers"] if name not in results["missing"]]
    cases = results["cases"]
    parts = [
        "# This server and others",
        f"{machine['cpu']}, one core for the server and one for the callers; load "
        f"{machine['load']:.1f} before; Python {machine['python']}, torch {machine['torch']}. "
        f"Medians of {results['plan']['rounds']} rounds of {results['plan']['seconds']} s.",
        "Sequences a second, the least and the most of the rounds in brackets:",
        _table(
            ["", "no server", *names, "ours / best other", "ours / no server"],
            [
                [
                    case["name"],
                    f"{case['engine_sequences_per_s']['median']:,.0f}",
                    *(_cell(case, name, "sequences_per_s", ",.0f") for name in names),
                    _times(case.get("over_best_peer"), case.get("best_peer")),
                    _times(case.get("over_engine")),
                ]
                for case in cases
            ],
        ),
        "Milliseconds of a call, median and 99th percentile:",
        _table(
            ["", *names],
            [[case["name"], *(_latency(case, name) for name in names)] for case in cases],
        ),
        "Processor time of the server, in microseconds a sequence:",
        _table(
            ["", *names],
            [
                [
                    case["name"],
                    *(_cell(case, name, "cpu_us_per_sequence", ",.0f") for name in names),
                ]
                for case in cases
            ],
        ),
        _faults_table(results["faults"]),
        *(f"Without {name}: {reason}" for name, reason in results["missing"].items()),
        *(
            f"{case['name']}: no figure for {name}: {reason}"
            for case in cases
            for name, reason in case["failures"].items()
        ),
    ]
    return "\n\n".join(parts) + "\n"


def _faults_table(faults: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    kinds = list(dict.fromkeys(kind for found in faults.values() for kind in found))
    body = [
        [kind, *(_fault_text(found.get(kind, {})) for found in faults.values())] for kind in kinds
    ]
    return _table(["", *faults], body)


def _fault_text(found: Mapping[str, Any]) -> str:
    if "refused" in found:
        told = "refused" if found["refused"] else "scored"
        return f"{found['neighbours answered']} of {found['of']} others answered; itself {told}"
    if "work done" in found:
        return (
            f"{found['work done']:.0%} of the work done; the next caller waits "
            f"{found['next caller ms']:,.0f} ms"
        )
    if "answered" in found:
        return f"{found['answered']} of {found['of']} answered"
    return str(found.get("failed", "-"))


def _case_text(case: Mapping[str, Any]) -> str:
    servers = ", ".join(
        f"{name} {found['sequences_per_s']['median']:,.0f}"
        for name, found in case["servers"].items()
    )
    text = f"{case['name']}: {servers}; no server {case['engine_sequences_per_s']['median']:,.0f}"
    failed = "".join(f"; {name}: {reason}" for name, reason in case["failures"].items())
    return f"{text} sequences/s{failed}"


def _latency(case: Mapping[str, Any], name: str) -> str:
    found = case["servers"].get(name)
    if found is None:
        return "-"
    return f"{found['p50_ms']['median']:.2f}, {found['p99_ms']['median']:.1f}"


def _cell(case: Mapping[str, Any], name: str, figure: str, form: str) -> str:
    found = case["servers"].get(name)
    if found is None:
        return "-"
    spread = found[figure]
    return f"{spread['median']:{form}} ({spread['least']:{form}} to {spread['most']:{form}})"


def _times(ratio: Mapping[str, float] | None, of: str | None = None) -> str:
    if ratio is None:
        return "-"
    return f"{ratio['median']:.2f}" + (f" ({of})" if of else "")


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def _ratio(above: Sequence[float], below: Sequence[float]) -> dict[str, float]:
    """Round by round, so that other load on the machine meets both."""
    return _spread([a / b for a, b in zip(above, below, strict=True)])


def _rounded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _rounded(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_rounded(inner) for inner in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _table(headings: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    rows = [headings, ["---"] * len(headings), *body]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _draw(results: Mapping[str, Any], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    names = [name for name in results["servers"] if name not in results["missing"]]
    cases = results["cases"]
    figure, axes = pyplot.subplots(figsize=(11, 4.5), layout="constrained")
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        found = [
            (place, case["servers"][name]["sequences_per_s"], case["engine_sequences_per_s"])
            for place, case in enumerate(cases)
            if name in case["servers"]
        ]
        shares = [rate["median"] / engine["median"] for _, rate, engine in found]
        below = [
            s - rate["least"] / e["median"] for s, (_, rate, e) in zip(shares, found, strict=True)
        ]
        above = [
            rate["most"] / e["median"] - s for s, (_, rate, e) in zip(shares, found, strict=True)
        ]
        at = [place + (number - (len(names) - 1) / 2) * width for place, _, _ in found]
        axes.bar(at, shares, width, yerr=[below, above], label=name, capsize=2)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(cases)), [case["name"].replace(", ", "\n") for case in cases])
    axes.tick_params(axis="x", labelsize=7)
    axes.set_ylabel("sequences/s over the engine alone")
    axes.legend()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
