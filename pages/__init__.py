"""What makes pages from sources: references, the index for language models, the agent skill, the site."""
