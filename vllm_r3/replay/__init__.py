"""Replay the rows of a rollout in a model of transformers, and the oracle that judges rows."""
