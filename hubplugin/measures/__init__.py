"""Figures of a ranking: how hubby it is, how well it finds what is true, and how sure that is."""
