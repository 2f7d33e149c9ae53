"""What stands in a page of a report."""

from html.parser import HTMLParser


class Parsed(HTMLParser):
    """The references of a page, and its tags."""

    def __init__(self, text):
        super().__init__()
        self.references, self.tags = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.tags.append(tag)
        referring = ("src", "href", "xlink:href", "srcset", "data", "action")
        self.references += [given[key] for key in referring if key in given]
