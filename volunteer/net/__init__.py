"""HTTP client: requests, retries, TLS, transfers."""
