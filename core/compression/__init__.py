"""Sequences that keep some of their tokens, and others in every layer and KV head."""
