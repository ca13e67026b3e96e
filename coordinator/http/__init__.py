"""The HTTP server: routes parse, call one service, and reply. No SQL, no torch."""
