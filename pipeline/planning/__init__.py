"""What a job will need, before any weight is loaded: memory, traffic, calls, time, and its problems."""
