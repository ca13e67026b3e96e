"""Words, numbers and dates in the language of the owner."""
