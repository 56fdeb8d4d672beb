"""A drafter and a verifier: plain classes that hold one model each, and what crosses between them."""
