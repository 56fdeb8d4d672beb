"""The language models behind one interface: slot caches for both families."""
