"""speccascade: which combination of a drafter and a verifier gives which quality at which cost."""
