"""`python -m tests.train.bounded_run`: train.distill with eight shards for the tiny workspace."""

from __future__ import annotations

from train import store
from train.distill import main

# A row of 30 tokens, one tap and 24 taught states of 32 float32 numbers: 30 * (128 + 4) + 24 * (128 + 8) =
# 7224 bytes, and 9 more for a flag and a checksum. Four of them make a shard; 32 rows make eight.
SHARD = 4 * 7233 + store.HEADER_BYTES
SHARDS = 8

if __name__ == "__main__":
    store.SHARD_BYTES = 4 * 7233
    main()
