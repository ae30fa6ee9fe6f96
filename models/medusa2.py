"""Medusa-2's network is Medusa's (medusa.py). What differs is that the target learns too
(train/objectives/medusa2.py), so that the draft belongs to the target which that run writes."""

from __future__ import annotations

from models.medusa import Medusa, NetworkConfig

__all__ = ["Draft", "NetworkConfig"]

Draft = Medusa
