"""HTTP routes: parse, one service call, reply. No SQL, no torch."""
