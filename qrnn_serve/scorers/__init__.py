"""The seam between a batch and a model: packed rows in, scores out. One file an engine."""

from qrnn_serve.scorers.loader import ScorerSpec, load_checked, load_scorer

__all__ = ["ScorerSpec", "load_checked", "load_scorer"]
