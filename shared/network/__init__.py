"""Addresses, links, proxies and certificates; what a machine downloads."""
