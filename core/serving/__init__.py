"""Between a user and the engine: prompts are read, requests checked, turns, batches and scores served."""
