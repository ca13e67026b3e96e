"""Games come in, are verified, rated and replayed."""
