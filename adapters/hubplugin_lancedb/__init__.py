"""hubplugin for LanceDB: a corrected copy of the vectors in a table beside the one that is corrected.

`hubplugin.open_store("lancedb:FOLDER/TABLE")` is the store that the jobs of `hubplugin` take.
"""

__all__: list[str] = []
