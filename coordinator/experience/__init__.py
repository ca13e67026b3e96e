"""Games and other episodes that actors make: checked, kept for learners, and used for ratings."""
