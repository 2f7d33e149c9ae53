"""What finds no right to write, or no room, is refused before the gallery is read, in each store that is a folder."""

import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

import hubplugin
from hubplugin.metric import Metric
from tests.galleries import unit
from tests.keepers import DIM, KEEPERS
from tests.refusals import refused

RNG = np.random.default_rng(0)
GALLERY, BANK = (unit(RNG.normal(size=(rows, DIM))) for rows in (300, 200))


@pytest.fixture(params=sorted({*KEEPERS} - {"InPostgres"}))
def url(request, tmp_path):
    """A gallery in the folder `store`."""
    (tmp_path / "store").mkdir()
    user = KEEPERS[request.param](str(tmp_path / "store"), Metric.COSINE)
    user.create()
    user.put([user.key(number) for number in range(300)], GALLERY)
    user.restart()
    return user.url


def test_a_disk_that_is_too_small_is_told_before_the_gallery_is_read(url, monkeypatch):
    store = hubplugin.open_store(url)
    full = shutil.disk_usage("/")._replace(free=100)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: full)
    monkeypatch.setattr(
        type(store), "scan", lambda *_: pytest.fail("the gallery was read")
    )
    needed = r"^cannot write in '.*store': No space left on device, [\d,]+ bytes are needed and 100 were free; nothing"
    for given in ((BANK, "csls"), (hubplugin.fit(None, BANK, "csls"),)):
        with refused(hubplugin.StoreError, needed):
            hubplugin.apply(store, *given)


def unprivileged(folder):
    """Return what runs a command for which `folder` is not to be written to."""
    folder.chmod(0o555)
    if os.geteuid():
        return []
    without = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]
    try:
        subprocess.run([*without, "true"], check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs setpriv, or another user than root, who may write anywhere")
    return without


def lying(folder):
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path: path.read_bytes() for path in files}


@pytest.mark.slow
def test_a_folder_that_may_not_be_written_is_told_in_one_line_and_before_the_fit(
    url, tmp_path
):
    np.save(tmp_path / "bank.npy", BANK)
    before = lying(tmp_path)
    command = [*unprivileged(tmp_path / "store"), sys.executable, "-m", "hubplugin"]
    words = ["apply", url, "--bank", tmp_path / "bank.npy", "--method", "csls"]
    done = subprocess.run([*command, *words, "--force"], capture_output=True, text=True)
    assert done.returncode == 1
    said = done.stderr
    assert "Permission denied" in said or "attempt to write a readonly database" in said
    assert said.count("\n") == 1, "the gallery was read"
    assert lying(tmp_path) == before
