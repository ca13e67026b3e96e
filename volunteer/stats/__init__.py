"""Statistics of a volunteer: milestones and ledger pages."""
