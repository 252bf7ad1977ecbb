"""From a step plan to tensors and one forward pass: attention over pages, sampling, and decoding as one replayed program."""
