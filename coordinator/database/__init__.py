"""SQL of the coordinator: the engine, the tables, the migrations and one file of functions
a noun.
"""
