"""The double-entry ledger: postings, payments, spending, its hash chain and its check."""
