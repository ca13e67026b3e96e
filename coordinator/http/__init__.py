"""HTTP server: routes parse a request, call one service, and reply. No SQL, no torch."""
