"""The only SQL: an engine, tables, migrations and one file of functions a noun."""
