"""Propose, verify, commit: the speculative decoder. One verifier and one cache serve every drafter."""
