"""Pure rules of dispatch, sizing, trust, validation, run files: no storage, no asyncio."""
