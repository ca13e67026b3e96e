"""Installation and start of our programs, the limits of their machine, and the errors and signs of
life on their command lines.
"""
