"""Objectives and the training loop."""
