"""Looking at an engine from outside: what its memory is used for, now and over time."""
