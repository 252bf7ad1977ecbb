"""From a step plan to one forward pass: attention over pages, sampling, and decoding as a replayed program."""
