"""hubplugin for LanceDB: candidates are ranked again by offsets in a table beside.

`hubplugin.open_store("lancedb:FOLDER/TABLE")` is the store that the jobs of `hubplugin`
take.
"""

__all__: list[str] = []
