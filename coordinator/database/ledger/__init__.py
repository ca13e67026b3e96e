"""Double-entry ledger: postings, payments, spending, the tree over it and its check."""
