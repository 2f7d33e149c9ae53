"""What is done with a store: correct it, write to it, diagnose it, watch over it, return to an earlier version."""
