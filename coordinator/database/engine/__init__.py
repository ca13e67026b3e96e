"""SQLite and PostgreSQL behind one interface: transactions, locks, statements, dumps."""
