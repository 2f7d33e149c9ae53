"""hubplugin for LanceDB: reranks candidates with offsets from a separate table.

`hubplugin.open_store("lancedb:FOLDER/TABLE")` opens a store for the jobs of
`hubplugin`.
"""

__all__: list[str] = []
