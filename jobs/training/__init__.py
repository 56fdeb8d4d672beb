"""Trains the two embedded drafter and verifier pairs from public, openly licensed text."""
