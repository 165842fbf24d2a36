"""Test adapters and recipes beside the real packages of trainers, on two cores.

Their environment is .envs/integrations, kept between calls; tests/integrations has the list of packages.
"""

from __future__ import annotations

import os
import subprocess
import sys

from environments import ROOT, build, prepare

#: The packages warn of one another; what thalweg warns of is an error here too.
WARNINGS = ["-W", "default", "-W", "error::thalweg.UnusedOverrideWarning", "-W", "error::thalweg.ResumeWarning"]
SURROUNDINGS = {
    "THALWEG_INTEGRATIONS": "required",  # nothing is left out
    "HF_HUB_OFFLINE": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
}


def main() -> int:
    python = str(prepare("integrations", build(), ["all"]))
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--constraint", "constraints.txt"]
    lists = ROOT / "tests" / "integrations"
    subprocess.run([*pip, "hypothesis", "sybil", "--requirement", lists / "packages.txt"], cwd=ROOT, check=True)
    subprocess.run([*pip, "--no-deps", "--requirement", lists / "packages-alone.txt"], cwd=ROOT, check=True)
    # the examples of a page follow from one another
    pytest = [python, "-m", "pytest", "--quiet", "-p", "no:cacheprovider", "-n", "2", "--dist", "loadfile", *WARNINGS]
    environment = {**os.environ, **SURROUNDINGS}
    results = [
        subprocess.run([*pytest, folder], cwd=ROOT, env=environment, check=False).returncode
        for folder in ("tests/integrations", "docs/recipes")
    ]
    sys.stdout.write(f"\nintegrations: {'FAILED' if any(results) else 'all passed'}\n")
    return int(any(results))


if __name__ == "__main__":
    raise SystemExit(main())
