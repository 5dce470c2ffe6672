"""Replay and recording: how a workflow's body runs, stops anywhere, and goes on elsewhere."""
