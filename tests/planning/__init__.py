"""Plans: each number against what a real run, a real bank or a real fleet shows."""
