"""What Triton's pytorch backend calls: every argument of `forward` is a tensor that must be given.

Annotations stay objects here, which the script compiler reads.
"""

from torch import Tensor, nn

from qrnn_serve.model.sequence_model import SequenceModel


class Scoring(nn.Module):
    """A model without carried state.

    Args:
        model: What is scored.
    """

    def __init__(self, model: SequenceModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, input: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Output and state after each row, as SequenceModel gives them."""
        return self.model(input, lengths)


class Streaming(nn.Module):
    """A model whose caller carries the state.

    Args:
        model: What is scored.
    """

    def __init__(self, model: SequenceModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, input: Tensor, lengths: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Output and state after each row, as SequenceModel gives them."""
        return self.model(input, lengths, state)
