"""From a dataset to shards of examples: loading, prompts, tokens."""
