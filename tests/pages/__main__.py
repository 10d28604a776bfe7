"""Runs the code blocks of a page, in their order and in one namespace: ``python -m tests.pages PAGE FOLDER``.

What a block needs beside those before it comes from blocks that a reader does not see, in comments of HTML. Of a diff,
what it leaves is run. Shell is read, not run: the files of the project that it names have to be there. Files to be
added to the project (``# hvd_periodic/...``) have a test of their own, test_contributing.py.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from sybil import Example, Sybil
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.markdown import CodeBlockParser

ROOT = Path(__file__).parents[2]
OURS = re.compile(r"(?:run_scripts|examples)/[\w./]+\.\w+")


def python(example: Example) -> None:
    """Run it, unless it is a file to be added."""
    if not re.match(r"# (?:hvd_periodic|tests)/\S+\.py\n", example.parsed):
        PythonEvaluator()(example)


def diff(example: Example) -> None:
    """Run what is left by a diff; what was there has to be Python, too."""
    lines = [line for line in example.parsed.splitlines() if not line.startswith(("---", "+++", "@@"))]
    before = "".join(f"{line[1:]}\n" for line in lines if not line.startswith("+"))
    compile(before, f"{example.path}:{example.line}, before", "exec")
    after = "".join(f"{line[1:]}\n" for line in lines if not line.startswith("-"))
    exec(compile(after, f"{example.path}:{example.line}", "exec"), example.namespace)


def shell(example: Example) -> None:
    """Read it."""
    done = subprocess.run(["bash", "-n"], input=example.parsed, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    for name in OURS.findall(example.parsed):
        assert (ROOT / name).is_file(), f"{example.path}:{example.line} names {name}, which is not there"


def run(page: Path) -> int:
    """Run all blocks of a page; return how many there are."""
    evaluators = {"python": python, "diff": diff, "bash": shell}
    sybil = Sybil([CodeBlockParser(language, evaluator) for language, evaluator in evaluators.items()])
    examples = list(sybil.parse(page).examples())
    for example in examples:
        example.evaluate()
    return len(examples)


if __name__ == "__main__":
    page = Path(sys.argv[1]).resolve()
    os.chdir(sys.argv[2])  # For what the blocks write.
    print(f"{run(page)} blocks\n", end="", flush=True)
