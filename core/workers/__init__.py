"""Threads that work beside an engine's own: for what is slow, and needs neither its pages nor its queues."""
