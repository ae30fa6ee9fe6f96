"""Thin things run by hand: the demo and what it fetches. They may import any room; nothing imports them."""
