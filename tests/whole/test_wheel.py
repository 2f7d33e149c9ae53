"""A wheel in an empty environment: the core alone says what it lacks, with the extras a checkout runs its demo."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
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
    result = subprocess.run(
        [*map(str, command)], cwd=cwd, env=clean, capture_output=True, text=True
    )
    assert not check or result.returncode == 0, result.stdout + result.stderr
    return result


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Made from the source distribution, which lies beside it."""
    folder = tmp_path_factory.mktemp("dist")
    run(
        sys.executable,
        "-m",
        "build",
        "--no-isolation",
        "--outdir",
        folder,
        ROOT,
        cwd=folder,
    )
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def metadata(wheel):
    name = next(
        each
        for each in zipfile.ZipFile(wheel).namelist()
        if each.endswith(".dist-info/METADATA")
    )
    return message_from_bytes(zipfile.ZipFile(wheel).read(name))


def test_the_wheel_carries_every_module_their_types_the_page_of_reports_and_nothing_else(
    wheel,
):
    expected = {
        path.relative_to(ROOT).as_posix() for path in ROOT.glob("hubplugin/**/*.py")
    }
    expected |= {
        path.relative_to(ROOT / "adapters").as_posix()
        for path in ROOT.glob("adapters/**/*.py")
    }
    expected |= {f"{name.split('/')[0]}/py.typed" for name in expected} | {
        "hubplugin/results.html"
    }
    assert {
        name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name
    } == expected
    assert wheel.stat().st_size < 2**20


def test_every_extra_names_only_extras_that_there_are(metadata):
    assert metadata["Version"] == __version__
    extras = set(metadata.get_all("Provides-Extra"))
    assert extras >= {"faiss", "qdrant", "tables", "evaluation", "frameworks", "all"}
    for requirement in map(Requirement, metadata.get_all("Requires-Dist")):
        if requirement.name == "hubplugin":
            assert requirement.extras <= extras
        if requirement.marker is None:  # the core needs neither store
            assert not requirement.name.startswith(
                ("chroma", "faiss", "lance", "qdrant")
            )


def test_the_page_that_an_index_shows_can_be_rendered(wheel):
    made = sorted(wheel.parent.iterdir())
    assert [path.suffix for path in made] == [".whl", ".gz"]
    run(sys.executable, "-m", "twine", "check", "--strict", *made, cwd=wheel.parent)


def test_the_source_distribution_has_the_tests_and_nothing_of_a_workplace(wheel):
    with tarfile.open(next(wheel.parent.glob("*.tar.gz"))) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "tests/whole/test_wheel.py"} <= names
    assert not {
        name
        for name in names
        if name.startswith((".github/", ".ci/", ".venv", "dist/"))
    }


PROGRAM = """
import sys
import hubplugin, hubplugin_faiss, hubplugin_qdrant
print(hubplugin.__version__, 'torch' in sys.modules)
"""


@pytest.mark.network
@pytest.mark.parametrize("version", ["3.10", "3.11", "3.12", "3.13"])
def test_the_wheel_serves_without_torch_on_every_python(wheel, tmp_path, version):
    installed = sorted(
        Path.home().glob(f".pyenv/versions/{version}.*/bin/python")
    )  # pyenv's own command chooses one
    python = next(iter(installed), shutil.which(f"python{version}"))
    if python is None:
        pytest.skip(
            f"Python {version} is not on this machine: install it, with its venv"
        )
    run(python, "-m", "venv", tmp_path / "env", cwd=tmp_path)
    pip = (
        tmp_path / "env" / "bin" / "python",
        "-m",
        "pip",
        "install",
        "--quiet",
        "--only-binary",
        ":all:",
    )
    run(
        *pip,
        "--constraint",
        ROOT / "constraints.txt",
        f"{wheel}[faiss,qdrant]",
        cwd=tmp_path,
    )
    shown = run(tmp_path / "env" / "bin" / "python", "-c", PROGRAM, cwd=tmp_path).stdout
    assert shown == f"{__version__} False\n"
    assert (
        "diagnose"
        in run(tmp_path / "env" / "bin" / "hubplugin", "--help", cwd=tmp_path).stdout
    )


@pytest.mark.network
def test_the_steps_of_the_dockerfile_make_a_service(tmp_path):
    """Its first two stages as a script in a folder, where no base image is to be had."""
    venv.create(tmp_path / "env", with_pip=True)
    stages = (
        (ROOT / "Dockerfile").read_text().replace("\\\n", " ").split("\nFROM ")[1:3]
    )
    for line in "\n".join(stages).splitlines():
        step, _, rest = line.partition(" ")
        here = re.sub(r"(?<=[\s\"])/(?=wheel|tmp)", f"{tmp_path}/", f" {rest}")
        if step == "WORKDIR":
            (tmp_path / "source").mkdir()
        elif step == "COPY" and "--from" not in rest:
            *sources, target = here.split()
            for each in sources:
                place = (
                    tmp_path / "source" / target
                    if not target.startswith("/")
                    else Path(target)
                )
                place.parent.mkdir(parents=True, exist_ok=True)
                whole = (ROOT / each).is_dir()
                shutil.copytree(ROOT / each, place) if whole else shutil.copy(
                    ROOT / each, place
                )
        elif step == "COPY":
            _, made, target = here.split()
            shutil.copytree(made, target)
        elif step == "RUN":
            script = here.replace("&& useradd --create-home user", "")
            path = f"PATH={tmp_path / 'env' / 'bin'}:$PATH"
            run("bash", "-euc", f"export {path}; {script}", cwd=tmp_path / "source")
    assert (
        "diagnose"
        in run(tmp_path / "env" / "bin" / "hubplugin", "--help", cwd=tmp_path).stdout
    )


@pytest.mark.network
def test_the_wheel_in_an_empty_environment_runs_the_demo(wheel, tmp_path):
    venv.create(tmp_path / "env", with_pip=True)
    python, command = (
        tmp_path / "env" / "bin" / "python",
        tmp_path / "env" / "bin" / "hubplugin",
    )
    pip = (
        python,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--constraint",
        ROOT / "constraints.txt",
    )

    run(*pip, f"{wheel}[fit]", cwd=tmp_path)
    program = "import hubplugin, numpy as np; x = np.eye(4); print(hubplugin.fit(x, x).offsets(x).shape)"
    assert run(python, "-c", program, cwd=tmp_path).stdout == "(4,)\n"
    without_stores = run(
        command, "inspect", "faiss:photos.faiss", cwd=tmp_path, check=False
    )
    assert without_stores.returncode == 1
    assert without_stores.stderr.count("\n") == 1
    assert "pip install '.[faiss]'" in without_stores.stderr

    run(*pip, f"{wheel}[faiss,qdrant]", cwd=tmp_path)
    shown = run(python, ROOT / "examples" / "demo.py", cwd=tmp_path).stdout
    for row in ("Faiss, raw", "Faiss, corrected", "Qdrant, raw", "Qdrant, corrected"):
        assert row in shown
