"""The module: layer, stack, whole model, carried state, checkpoint."""
