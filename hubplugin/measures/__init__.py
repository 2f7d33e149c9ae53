"""Measure rankings: hubness, recall of true targets, and the certainty of both."""
