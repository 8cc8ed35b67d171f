"""How the files of this folder were made, once, with the first release's checkpoint format.

They stay as they are: every later release must read them. Run it into another folder to make such
files for a new format version.

    python make.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch

from qrnn_serve import SequenceModel, save
from qrnn_serve.model.config import LayerConfig, QRNNConfig, SequenceModelConfig

CONFIG = SequenceModelConfig(
    qrnn=QRNNConfig(
        input_size=4,
        layers=(
            LayerConfig(hidden_size=5, window=2, zoneout=0.125),
            LayerConfig(hidden_size=3, output_gate=False),
        ),
        bidirectional="per_layer",
        dropout=0.25,
        weight_drop=0.5,
    ),
    vocabulary_size=7,
    padding_id=1,
    pooling="last_max_mean",
    head_size=2,
)


def main(folder: Path) -> None:
    """Write model.pt, model.safetensors and expected.npz."""
    torch.manual_seed(1)
    model = SequenceModel(CONFIG).eval()
    ids, lengths = torch.randint(0, 7, (3, 6)), torch.tensor([6, 1, 4])
    state = torch.randn(3, model.state_size)
    output, state_out = model.double()(ids, lengths, state.double())
    save(model.float(), folder / "model.pt")
    save(model, folder / "model.safetensors")
    np.savez(
        folder / "expected.npz",
        ids=ids.numpy(),
        lengths=lengths.numpy(),
        state=state.numpy(),
        output=output.detach().numpy(),
        state_out=state_out.detach().numpy(),
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
