"""The only HTTP: the client, retries, TLS, transfers."""
