"""SQL of the coordinator: engine, tables, migrations, and one file of functions a noun."""
