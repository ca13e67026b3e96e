"""`coordinator simulate`: the same services in virtual time, to choose a plan early."""
