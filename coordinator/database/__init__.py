"""SQL of the coordinator: engine, tables, migrations, and a file of functions for each subject."""
