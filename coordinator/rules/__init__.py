"""Pure rules of dispatch, sizing, trust, validation and run files: no database, no storage, no
asyncio.
"""
