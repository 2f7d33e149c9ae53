"""Tries one step with little room left, on a disk of its own: python full_disk.py FOLDER SIZE FREE STEP

FOLDER, beside which lies bank.npy, is copied to an empty tmpfs of SIZE KiB, which is filled up to FREE KiB. Prints as
JSON how the step ended, what it said, whether all is as before, how many KiB less are free, and what lies there then.
To be run under `unshare --mount`.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

STEPS = {
    "apply": "hubplugin.apply(hubplugin.open_store('faiss:x.faiss'), BANK, 'csls', force=True)",
    "model": "hubplugin.apply(hubplugin_faiss.open_store('x.faiss'), hubplugin.fit(None, BANK, 'csls'))",
    "rollback": "hubplugin.rollback(hubplugin.open_store('faiss:x.faiss'))",
    "remove": "hubplugin.open_store('faiss:x.faiss').remove()",
}
PROGRAM = """
import sys, warnings; warnings.simplefilter("ignore")
import hubplugin, hubplugin_faiss
try:
    STEP
except hubplugin.HubpluginError as error:
    sys.exit(str(error))
"""


def content(folder: Path) -> dict[str, str]:
    files = (
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in ("filler", "lock")
    )
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


def main(source: str, size: int, free: int, step: str) -> None:
    folder = Path(source).with_name("full")
    folder.mkdir(exist_ok=True)
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}k", "tmpfs", str(folder)],
        check=True,
    )
    subprocess.run(
        ["cp", "-r", "--sparse=always", f"{source}/.", str(folder)], check=True
    )
    room = os.statvfs(folder)
    with (folder / "filler").open("wb") as filler:
        os.posix_fallocate(
            filler.fileno(), 0, room.f_bavail * room.f_bsize - 1024 * free
        )
    before = content(folder)
    bank = repr(str(Path(source).with_name("bank.npy").resolve()))
    command = [
        sys.executable,
        "-c",
        PROGRAM.replace("STEP", STEPS[step].replace("BANK", bank)),
    ]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    left = shutil.disk_usage(folder).free // 1024
    print(
        json.dumps(
            [
                run.returncode,
                run.stderr,
                before == content(folder),
                free - left,
                sorted(content(folder)),
            ]
        )
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
