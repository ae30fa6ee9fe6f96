"""Traffic in, prompts, replies and token rows out. The entry points are data.prepare and data.regenerate."""
