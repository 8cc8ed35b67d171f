"""All ways to run the artefacts of a model."""

from __future__ import annotations

import numpy as np
import torch

from support.exported import session, write


def runners(model, directory):
    """All ways to run the artefacts of a model, as functions (input, state) -> arrays."""
    script, graph = write(model, directory, "torchscript", "onnx")
    scripted = torch.jit.load(script)

    def run_script(x, state):
        return scripted(x, None, state)

    def run_packed(x, state):
        offsets = torch.arange(len(x) + 1) * x.shape[1]
        output, state = scripted.forward_packed(x.flatten(0, 1), offsets, state)
        return output if model.pooling != "none" else output.unflatten(0, x.shape[:2]), state

    def run_graph(library):
        loaded = session(graph, library=library)

        def run(x, state):
            feed = {"input": x.numpy(), "lengths": np.full(len(x), x.shape[1], np.int64)}
            if state is not None:
                feed["state"] = np.asarray(state)
            return loaded.run(None, feed)

        return run

    return {
        "forward": run_script,
        "forward_packed": run_packed,
        "custom op": run_graph(True),
        "function body": run_graph(False),
    }
