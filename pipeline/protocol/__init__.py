"""Pure tensor mathematics: distributions, deferral rules, verification. No models, no I/O."""
