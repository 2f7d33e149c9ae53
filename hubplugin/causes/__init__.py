"""Causes of bad searches that are not hubness, told apart: each a function of samples that returns a `Finding`."""

from hubplugin.causes.documents import copies, short_texts
from hubplugin.causes.finding import Finding
from hubplugin.causes.queries import HUBBY, cut_off, other_model, shifted
from hubplugin.causes.space import collapsed, lengths

__all__ = ["HUBBY", "Finding", "collapsed", "copies", "cut_off", "lengths", "other_model", "shifted", "short_texts"]
