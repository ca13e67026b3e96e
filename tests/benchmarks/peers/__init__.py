"""Programs that run in the environments of the peers, with nothing of ours in them: each prints one
line of JSON.
"""
