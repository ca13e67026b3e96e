"""What a volunteer has done: the card, milestones, ledger pages."""
