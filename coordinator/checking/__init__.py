"""Checks of work: drawn tasks done again, by the server, a checker or an auditor."""
