"""The error of an export that proved wrong; all others are in qrnn_serve.core.errors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qrnn_serve.core.errors import ArtefactError

if TYPE_CHECKING:
    from qrnn_export.proof import Proof


class ParityError(ArtefactError):
    """An artefact does not give the module's numbers.

    Attributes:
        proof: What was measured; None when the artefacts could not be run at all.
    """

    def __init__(self, message: str, proof: Proof | None = None) -> None:
        super().__init__(message)
        self.proof = proof
