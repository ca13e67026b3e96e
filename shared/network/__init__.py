"""Join links and their QR codes, proxies, certificate pins, and the routes of downloads."""
