"""The public web page of a coordinator."""
