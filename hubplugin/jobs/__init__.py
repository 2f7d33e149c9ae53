"""Jobs on a store: correct it, write to it, diagnose it, inspect it, roll it back."""
