"""hubplugin for LanceDB: more candidates are fetched and ranked again by offsets, which lie in a table beside.

`hubplugin.open_store("lancedb:FOLDER/TABLE")` is the store that the jobs of `hubplugin` take.
"""

__all__: list[str] = []
