"""Protocol: messages, paths and limits on which the two sides must agree.

JSON by msgspec, one frozen struct a message, unknown fields ignored so that a newer side may add
some. Times are UTC epoch seconds of the coordinator's clock; durations end in `_s`, sizes in
`_bytes`; credits are integer micro-credits (`_micro`).
"""
