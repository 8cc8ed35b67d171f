"""Key layouts of foreign checkpoints: one module each, listed in `registry`."""
