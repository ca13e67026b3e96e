"""Who the volunteer is at which coordinator: profiles, joining, public runs."""
