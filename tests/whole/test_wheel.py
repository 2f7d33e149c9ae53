"""A wheel in an empty environment: the core alone says what it lacks, with the extras a checkout runs its demo."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from hubplugin import __version__

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent


def run(*command, cwd, check=True):
    clean = {
        key: value
        for key, value in os.environ.items()
        if key not in ("PYTHONPATH", "VIRTUAL_ENV")
    }
    words = [*map(str, command)]
    result = subprocess.run(words, cwd=cwd, env=clean, capture_output=True, text=True)
    assert not check or result.returncode == 0, result.stdout + result.stderr
    return result


def install(folder, what, python=sys.executable):
    """Install `what` in the environment of a folder; return where its commands lie."""
    run(python, "-m", "venv", folder / "env", cwd=folder)
    commands = folder / "env" / "bin"
    options = ["--quiet", "--only-binary", ":all:", "--constraint"]
    pip = [commands / "python", "-m", "pip", "install", *options]
    run(*pip, ROOT / "constraints.txt", what, cwd=folder)
    return commands


def assert_helps(commands, folder):
    assert "diagnose" in run(commands / "hubplugin", "--help", cwd=folder).stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Made from the source distribution, which lies beside it."""
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "build", "--no-isolation"]
    run(*build, "--outdir", folder, ROOT, cwd=folder)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def contents(wheel):
    return zipfile.ZipFile(wheel)


def test_the_wheel_carries_every_module_their_types_the_page_of_reports_and_nothing_else(
    wheel, contents
):
    expected = {"hubplugin/results.html"}
    for folder, root in ((ROOT / "hubplugin", ROOT), (ROOT / "adapters",) * 2):
        for path in folder.glob("**/*.py"):
            name = path.relative_to(root).as_posix()
            expected |= {name, f"{name.partition('/')[0]}/py.typed"}
    names = {name for name in contents.namelist() if ".dist-info/" not in name}
    assert names == expected
    assert wheel.stat().st_size < 2**20


def test_every_extra_names_only_extras_that_there_are(contents):
    (name,) = [name for name in contents.namelist() if name.endswith("METADATA")]
    metadata = message_from_bytes(contents.read(name))
    assert metadata["Version"] == __version__
    extras = set(metadata.get_all("Provides-Extra"))
    assert extras >= {"faiss", "qdrant", "tables", "evaluation", "frameworks", "all"}
    stores = ("chroma", "faiss", "lance", "qdrant")
    for requirement in map(Requirement, metadata.get_all("Requires-Dist")):
        if requirement.name == "hubplugin":
            assert requirement.extras <= extras
        if requirement.marker is None:  # the core needs neither store
            assert not requirement.name.startswith(stores)


def test_the_page_that_an_index_shows_can_be_rendered(wheel):
    made = sorted(wheel.parent.iterdir())
    assert [path.suffix for path in made] == [".whl", ".gz"]
    run(sys.executable, "-m", "twine", "check", "--strict", *made, cwd=wheel.parent)


def test_the_source_distribution_has_the_tests_and_nothing_of_a_workplace(wheel):
    with tarfile.open(next(wheel.parent.glob("*.tar.gz"))) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "tests/whole/test_wheel.py"} <= names
    of_a_workplace = (".github/", ".ci/", ".venv", "dist/")
    assert not any(name.startswith(of_a_workplace) for name in names)


PROGRAM = """
import sys
import hubplugin, hubplugin_faiss, hubplugin_qdrant
print(hubplugin.__version__, 'torch' in sys.modules)
"""


@pytest.mark.network
@pytest.mark.parametrize("version", ["3.10", "3.11", "3.12", "3.13"])
def test_the_wheel_serves_without_torch_on_every_python(wheel, tmp_path, version):
    # pyenv's own command chooses one.
    installed = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    python = next(iter(installed), shutil.which(f"python{version}"))
    if python is None:
        pytest.skip(f"install Python {version}, with its venv")
    commands = install(tmp_path, f"{wheel}[faiss,qdrant]", python)
    shown = run(commands / "python", "-c", PROGRAM, cwd=tmp_path).stdout
    assert shown == f"{__version__} False\n"
    assert_helps(commands, tmp_path)


@pytest.mark.network
def test_the_steps_of_the_dockerfile_make_a_service(tmp_path):
    """Its first two stages as a script in a folder, where no base image is to be had."""
    run(sys.executable, "-m", "venv", tmp_path / "env", cwd=tmp_path)
    commands = tmp_path / "env" / "bin"
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    stages = text.split("\nFROM ")[1:3]
    for line in "\n".join(stages).splitlines():
        step, _, rest = line.partition(" ")
        here = re.sub(r"(?<=[\s\"])/(?=wheel|tmp)", f"{tmp_path}/", f" {rest}")
        if step == "WORKDIR":
            (tmp_path / "source").mkdir()
        elif step == "COPY" and "--from" not in rest:
            *sources, target = here.split()
            for each in sources:
                place = tmp_path / "source" / target  # which may be absolute
                place.parent.mkdir(parents=True, exist_ok=True)
                copy = shutil.copytree if (ROOT / each).is_dir() else shutil.copy
                copy(ROOT / each, place)
        elif step == "COPY":
            _, made, target = here.split()
            shutil.copytree(made, target)
        elif step == "RUN":
            script = here.replace("&& useradd --create-home user", "")
            path = f"PATH={commands}:$PATH"
            run("bash", "-euc", f"export {path}; {script}", cwd=tmp_path / "source")
    assert_helps(commands, tmp_path)


@pytest.mark.network
def test_the_wheel_in_an_empty_environment_runs_the_demo(wheel, tmp_path):
    commands = install(tmp_path, f"{wheel}[fit]")
    python = commands / "python"
    program = "import hubplugin, numpy as np; x = np.eye(4); print(hubplugin.fit(x, x).offsets(x).shape)"
    assert run(python, "-c", program, cwd=tmp_path).stdout == "(4,)\n"
    inspect = [commands / "hubplugin", "inspect", "faiss:photos.faiss"]
    without_stores = run(*inspect, cwd=tmp_path, check=False)
    assert without_stores.returncode == 1
    assert without_stores.stderr.count("\n") == 1
    assert "pip install '.[faiss]'" in without_stores.stderr

    install(tmp_path, f"{wheel}[faiss,qdrant]")
    shown = run(python, ROOT / "examples" / "demo.py", cwd=tmp_path).stdout
    for row in ("Faiss, raw", "Faiss, corrected", "Qdrant, raw", "Qdrant, corrected"):
        assert row in shown
