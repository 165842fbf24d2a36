"""Look inside the sdist and the wheel in a folder: ``python tools/inside.py .envs/dist``.

Both have just the files under version control; one wheel serves every Python, and its core, which is put beside it,
shows its own symbols alone.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

folder = Path(sys.argv[1])
(sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
git = ["git", "-c", "safe.directory=*", "ls-files"]
files = set(subprocess.check_output(git, text=True).splitlines())
package = {name.removeprefix("src/") for name in files if name.startswith("src/") and not name.endswith(".cpp")}
with tarfile.open(sdist) as archive:
    inside = {member.name.partition("/")[2] for member in archive if member.isfile()}
assert inside == files | {"PKG-INFO"}, f"the sdist has not just its files: {inside ^ (files | {'PKG-INFO'})}"
with zipfile.ZipFile(wheel) as archive:
    inside = {name for name in archive.namelist() if ".dist-info/" not in name}
    (core,) = (name for name in inside if Path(name).name.startswith("_core."))
    library = folder / Path(core).name
    library.write_bytes(archive.read(core))
assert inside == package | {core}, f"the wheel has not just its files: {inside ^ (package | {core})}"
assert wheel.stem.split("-")[2:4] == ["py3", "none"], wheel.name
assert not wheel.stem.endswith("any"), wheel.name
if shutil.which("nm") and sys.platform == "linux":
    listed = subprocess.check_output(["nm", "--dynamic", "--defined-only", library], text=True)
    names = [line.split()[-1] for line in listed.splitlines()]
    assert {name.partition("_")[0] for name in names} == {"thalweg"}, f"the library exports {names}"
