"""Where KV lies and who holds it: pages, tables, prefix index, eviction, host tier, and what backs a pool."""
