"""The folder `hub` in a shard's own: the manifest, the models, and how far a run has come.

PATH/hub/manifest.json
PATH/hub/<fingerprint of the model>.hub
PATH/hub/progress.json
PATH/hub/off, while the correction is switched off
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from pydantic import ValidationError

from hubplugin import atomic
from hubplugin.errors import StoreError
from hubplugin.model import OffsetModel, load
from hubplugin.quarantine import Quarantine, parse
from hubplugin.store import Id
from hubplugin_qdrant import manifest as m
from hubplugin_qdrant.manifest import Manifest, Version
from hubplugin_qdrant.versioned_store import Metadata


class Folder(Metadata):
    """The metadata of the shard in the folder `shard`; `url` is what errors call it."""

    def __init__(self, shard: Path, url: str):
        self._path, self._url = shard / "hub", url
        self._known: tuple[object, Manifest] = (None, Manifest())

    def exists(self) -> bool:
        return self._path.exists()

    def create(self) -> None:
        self._path.mkdir(exist_ok=True)

    def delete(self) -> None:
        shutil.rmtree(self._path)

    def read_manifest(self) -> Manifest:
        """The manifest, read again only when its file is another one. Raises StoreError for a damaged one."""
        file = self._path / "manifest.json"
        try:
            status = file.stat()
        except FileNotFoundError:
            return Manifest()
        stamp = (status.st_ino, status.st_mtime_ns)
        if self._known[0] != stamp:
            self._known = (stamp, self._parsed(file.read_text()))
        return self._known[1]

    def _parsed(self, content: str) -> Manifest:
        try:
            return m.parse(json.loads(content), self._url)
        except (ValueError, ValidationError) as error:
            raise StoreError(
                f"{self._url}: hub/manifest.json is damaged ({error}); delete the folder hub and apply again"
            ) from None

    def write_manifest(self, manifest: Manifest) -> None:
        """Puts `manifest` in the place of the one before, in one step."""
        self._write("manifest.json", manifest.model_dump_json(indent=2))

    def is_off(self) -> bool:
        return (self._path / "off").exists()

    def write_switch(self, off: bool) -> None:
        switch = self._path / "off"
        if off:
            switch.touch()
        else:
            switch.unlink(missing_ok=True)

    def read_quarantine(self) -> Quarantine:
        file = self._path / "quarantine.json"
        return parse(file.read_bytes(), f"{self._url}: hub/quarantine.json") if file.is_file() else Quarantine()

    def write_quarantine(self, quarantine: Quarantine) -> None:
        self._write("quarantine.json", quarantine.model_dump_json(indent=2))

    def read_model(self, version: Version) -> OffsetModel:
        return load(self._model_file(version.model))

    def write_model(self, model: OffsetModel) -> int:
        model.save(self._model_file(model.fingerprint))
        return 1

    def delete_model(self, version: Version) -> None:
        self._model_file(version.model).unlink(missing_ok=True)

    def _model_file(self, fingerprint: str) -> Path:
        return self._path / f"{fingerprint}.hub"

    def read_progress(self, version: Version) -> Id | None:
        """The last point that was written under `version`, None if none was."""
        try:
            progress = json.loads((self._path / "progress.json").read_text())
        except FileNotFoundError:
            return None
        return progress["resume"] if progress["number"] == version.number else None

    def write_progress(self, version: Version, resume: Id | None) -> None:
        self._write("progress.json", json.dumps({"number": version.number, "resume": resume}))

    def _write(self, name: str, content: str) -> None:
        """Writes a file of the folder whole or not at all."""
        atomic.write(self._path / name, content.encode())
