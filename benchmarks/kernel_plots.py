"""Plots of a run: share of copy bandwidth by shape, and the speed-up grid over cuDNN's LSTM."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kernel_cases import DTYPES, GRID_BATCHES, GRID_TIMESTEPS

Cell = dict[str, Any]


def draw_plots(results: dict[str, Any], stem: Path) -> list[Path]:
    """Write the plots that the run's tables allow.

    Args:
        results: As written to the JSON.
        stem: Path of the files without their ending.

    Returns:
        The files written; none without matplotlib, which is said.
    """
    if importlib.util.find_spec("matplotlib") is None:
        print("no plots: matplotlib is not installed (pip install matplotlib)")
        return []
    import matplotlib as mpl

    mpl.use("Agg")
    drawn: list[Path] = []
    for table, draw in (("pool", _draw_shares), ("lstm", _draw_speedups)):
        cells = results["tables"].get(table)
        if cells:
            path = stem.with_name(f"{stem.name}-{table}.png")
            draw(cells, results["environment"]["device"].get("name", "").strip(), path)
            drawn.append(path)
    return drawn


def _draw_shares(cells: Sequence[Cell], device: str, path: Path) -> None:
    from matplotlib import pyplot

    forward = [cell for cell in cells if not cell["reverse"]]
    shapes = list(dict.fromkeys(tuple(cell["shape"]) for cell in forward))
    figure, axes = pyplot.subplots(figsize=(11, 4.5), layout="constrained")
    bars = [(dtype, packed) for dtype in DTYPES for packed in (False, True)]
    width = 0.8 / len(bars)
    for number, (dtype, packed) in enumerate(bars):
        chosen = {
            tuple(cell["shape"]): cell
            for cell in forward
            if cell["dtype"] == dtype and cell["packed"] == packed
        }
        at = [place + (number - (len(bars) - 1) / 2) * width for place in range(len(shapes))]
        heights = [100 * (chosen[s].get("share") or 0) if s in chosen else 0 for s in shapes]
        color = f"C{DTYPES.index(dtype)}"
        axes.bar(
            at,
            heights,
            width,
            color=color,
            alpha=0.55 if packed else 1.0,
            label=f"{dtype}, {'uneven lengths, packed' if packed else 'dense'}",
        )
        for x, shape in zip(at, shapes, strict=True):
            target = chosen[shape].get("target") if shape in chosen else None
            if target is not None:
                axes.hlines(100 * target, x - width / 2, x + width / 2, "black", linewidth=1.5)
    axes.axhline(100, color="grey", linewidth=0.8)
    axes.set_xticks(range(len(shapes)), [" x ".join(map(str, shape)) for shape in shapes])
    axes.set_xlabel("T x B x H")
    axes.set_ylabel("% of measured copy bandwidth")
    axes.set_title(f"qrnn::fo_pool, {device}; black marks: targets")
    figure.legend(loc="outside lower center", fontsize=8, ncols=3)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _draw_speedups(cells: Sequence[Cell], device: str, path: Path) -> None:
    from matplotlib import colors, pyplot

    dtypes = list(dict.fromkeys(cell["dtype"] for cell in cells))
    figure, panels = pyplot.subplots(
        1, len(dtypes), figsize=(6.5 * len(dtypes), 4.5), layout="constrained", squeeze=False
    )
    best = max((cell.get("ratio") or 1 for cell in cells), default=1)
    for dtype, axes in zip(dtypes, panels[0], strict=True):
        grid = [[float("nan")] * len(GRID_TIMESTEPS) for _ in GRID_BATCHES]
        for cell in cells:
            timesteps, batch, _ = cell["shape"]
            row, column = GRID_BATCHES.index(batch), GRID_TIMESTEPS.index(timesteps)
            if cell["dtype"] == dtype and cell.get("ratio") is not None:
                grid[row][column] = cell["ratio"]
                text = f"{cell['ratio']:.1f}x\n({cell['paper']}x)"
                weight = "bold" if cell["met"] else "normal"
                axes.text(column, row, text, ha="center", va="center", weight=weight, fontsize=9)
        axes.imshow(grid, cmap="YlGn", norm=colors.LogNorm(1, 4 * best), aspect="auto")
        axes.set_xticks(range(len(GRID_TIMESTEPS)), [str(steps) for steps in GRID_TIMESTEPS])
        axes.set_yticks(range(len(GRID_BATCHES)), [str(batch) for batch in GRID_BATCHES])
        axes.set_xlabel("sequence length")
        axes.set_ylabel("batch size")
        axes.set_title(f"{dtype} (in brackets: the paper's; bold: target met)")
    figure.suptitle(f"One 320-unit QRNN layer over cuDNN's LSTM, {device}")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
