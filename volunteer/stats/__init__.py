"""Statistics of a volunteer: the card, milestones, ledger pages."""
