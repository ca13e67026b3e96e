"""The only SQL: tables, migrations and one file of functions for each noun."""
