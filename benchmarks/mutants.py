"""Do the tests notice a bug? Hand-made ones, and a seeded random sample of mutants, each against the quick tests.

Every bug is put into a copy of the tree, alone, and the tests of its module run there until the first failure; of a
sample the fast ones. A bug is noticed when a test fails or does not end in its time. The copy's tests need neither Ray
nor Flower processes, and run in a process that is forked from one which has imported the heavy libraries::

    python benchmarks/mutants.py named
    python benchmarks/mutants.py sample --count 240 --seed 1
    python benchmarks/mutants.py sample --count 40 --seed 2 --only strategies/dssda

Results go to ``docs/results/mutants``. Survivors that change nothing that anybody sees are explained in
``docs/results/mutants/survivors.json``, by file, line of text and change.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatch
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from mutation import Mutant, compiles, mutants
from named_bugs import BUGS
from quick_tests import LEFT_OUT, MODULES, tests_of

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs/results/mutants"
SURVIVORS = RESULTS / "survivors.json"
COPIED = ("client_pipeline", "strategies", "flower_app", "configs", "tests", "benchmarks", "docs")
COPIED_FILES = ("pyproject.toml", "LICENSE", "README.md", "CHANGELOG.md")
PRELOADED = ("numpy", "scipy.optimize", "torch", "cvxpy", "transformers", "safetensors.torch", "hypothesis", "flwr.app")
LEAST_CPU_S, CPU_FACTOR = 15.0, 3.0
"""Processor time that a bug may take, in that of the tests without it: other work on the machine does not count."""
LEAST_WALL_S, WALL_FACTOR = 120.0, 10.0
"""A bug that waits for ever takes no processor time."""
MEMORY_LIMIT = 8 * 2**30
"""Memory limit of a process that runs tests [byte]."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Verdict on one bug."""

    file: str
    change: str
    text: str
    """The line that the bug is in."""
    noticed_by: str | None
    """The first test that failed, or ``time limit``; None: no test noticed."""
    seconds: float
    explanation: str | None = None

    @property
    def key(self) -> str:
        """Its name in the file of explanations: line numbers change, texts rarely."""
        return _key(self.file, self.text, self.change)


class Outcome(NamedTuple):
    """Outcome of a run of tests."""

    noticed_by: str | None
    wall_s: float
    cpu_s: float


def _key(file: str, text: str, change: str) -> str:
    return f"{file} | {text} | {change.split(' ', 1)[1]}"


class Tree:
    """A copy of the tree that one bug after the other is put into."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in COPIED:
            ignored = shutil.ignore_patterns("__pycache__", "results") if name == "docs" else None
            shutil.copytree(ROOT / name, folder / name, ignore=ignored or shutil.ignore_patterns("__pycache__"))
        for name in COPIED_FILES:
            shutil.copy(ROOT / name, folder / name)

    @contextlib.contextmanager
    def changed(self, file: str, text: bytes) -> Iterator[None]:
        """Have a file hold another text for a while."""
        path = self.folder / file
        before = path.read_bytes()
        # Python takes a file of the same second and size for the one that it has compiled.
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
            compiled.unlink()
        path.write_bytes(text)
        try:
            yield
        finally:
            path.write_bytes(before)

    def run(self, tests: Sequence[str], cpu_s: float, wall_s: float, *, compiles: bool = False) -> Outcome:
        """Run tests in a forked process until one fails."""
        start = time.monotonic()
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            _run_tests(self.folder, tests, writer, int(cpu_s), compiles)
        os.close(writer)
        ended, used_s = self._wait(child, start + wall_s)
        with os.fdopen(reader) as pipe:
            failed = pipe.read().strip()
        return Outcome(failed or ended, time.monotonic() - start, used_s)

    @staticmethod
    def _wait(child: int, end: float) -> tuple[str | None, float]:
        """Return the failure of an exit status, None if all is well; and the processor time [s]."""
        killed = False
        while True:
            pid, status, usage = os.wait4(child, os.WNOHANG)
            if pid:
                code, used_s = os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime
                if killed or code == -signal.SIGXCPU:
                    return "time limit", used_s
                return (f"the tests' process ended with {code}" if code else None), used_s
            if not killed and time.monotonic() > end:
                killed = True
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child, signal.SIGKILL)
            time.sleep(0.02)


def _run_tests(folder: Path, tests: Sequence[str], result: int, cpu_s: int, compiles: bool) -> None:
    """Never returns: it is the forked process."""
    os.setsid()
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_LIMIT, MEMORY_LIMIT))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 5))
    quiet = os.open(os.devnull if not os.environ.get("MUTANTS_VERBOSE") else "/dev/stderr", os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    os.chdir(folder)
    sys.path[:] = [str(folder), *(p for p in sys.path if Path(p or ".").resolve() not in (ROOT, ROOT / "benchmarks"))]
    os.environ["PYTHONPATH"] = str(folder)
    sys.dont_write_bytecode = not compiles
    code = 2
    try:
        import pytest

        code = int(pytest.main(["-x", "-n", "0", "-p", "no:cacheprovider", *tests], plugins=[_FirstFailure(result)]))
    except BaseException:
        code = 3
    finally:
        os._exit(code)


class _FirstFailure:
    """A pytest plugin that tells which test failed first."""

    def __init__(self, pipe: int) -> None:
        self._pipe: int | None = pipe

    def _tell(self, name: str) -> None:
        if self._pipe is not None:
            os.write(self._pipe, name.encode()[:1000])
            os.close(self._pipe)
            self._pipe = None

    def pytest_runtest_logreport(self, report) -> None:  # type: ignore[no-untyped-def]
        if report.failed:
            self._tell(report.nodeid)

    def pytest_collectreport(self, report) -> None:  # type: ignore[no-untyped-def]
        if report.failed:
            self._tell(f"{report.nodeid} (at its import)")


def _preload() -> None:
    """Import what is heavy and not under test, once."""
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    for name in PRELOADED:
        __import__(name)
    import torch

    torch.set_num_threads(1)
    assert not any(name.split(".")[0] in ("client_pipeline", "strategies", "flower_app") for name in sys.modules)


class Bug(NamedTuple):
    """One bug, ready to be put into a copy."""

    file: str
    change: str
    line: int
    text: bytes
    """The whole file with it."""
    tests: tuple[str, ...]


class Bench:
    """Judges bugs in one copy of the tree, one after the other."""

    def __init__(self, tree: Tree, explained: dict[str, str]) -> None:
        self._tree, self._explained = tree, explained
        self._baseline: dict[tuple[str, ...], Outcome] = {}

    def judge(self, bug: Bug) -> Verdict:
        """Put one bug in and run its tests, which must pass without it."""
        if (usual := self._baseline.get(bug.tests)) is None:
            usual = self._baseline[bug.tests] = self._tree.run(bug.tests, 900.0, 1800.0, compiles=True)
        if usual.noticed_by:
            raise SystemExit(f"without any bug the tests do not pass: {usual.noticed_by}")
        limits = max(LEAST_CPU_S, CPU_FACTOR * usual.cpu_s), max(LEAST_WALL_S, WALL_FACTOR * usual.wall_s)
        with self._tree.changed(bug.file, bug.text):
            outcome = self._tree.run(bug.tests, *limits)
        verdict = Verdict(
            file=bug.file,
            change=bug.change,
            text=(ROOT / bug.file).read_text().splitlines()[bug.line - 1].strip(),
            noticed_by=outcome.noticed_by,
            seconds=round(outcome.cpu_s, 2),
        )
        word = "noticed " if outcome.noticed_by else "SURVIVED"
        print(f"{word} {outcome.cpu_s:6.1f} s  {bug.file}:{bug.change}  {outcome.noticed_by or ''}", flush=True)
        return replace(verdict, explanation=None if outcome.noticed_by else self._explained.get(verdict.key))


def judge_all(bugs: Sequence[Bug], num_processes: int) -> Iterator[Verdict]:
    """Judge bugs in several processes, each with a copy of its own; in the order in which they are done."""
    explained = json.loads(SURVIVORS.read_text()) if SURVIVORS.exists() else {}
    with tempfile.TemporaryDirectory(prefix="collapipe-mutants-") as folder:
        trees = [Tree(Path(folder) / str(i)) for i in range(num_processes)]
        if num_processes == 1:
            yield from map(Bench(trees[0], explained).judge, bugs)
            return
        context = multiprocessing.get_context("fork")
        benches = context.SimpleQueue()
        for tree in trees:
            benches.put(tree)
        with context.Pool(num_processes, _open_bench, (benches, explained)) as pool:
            yield from pool.imap_unordered(_judge, bugs)


_bench: Bench | None = None


def _open_bench(trees: Any, explained: dict[str, str]) -> None:
    global _bench
    _bench = Bench(trees.get(), explained)


def _judge(bug: Bug) -> Verdict:
    assert _bench is not None
    return _bench.judge(bug)


def sample(count: int, seed: int, only: str | None) -> list[tuple[str, Mutant]]:
    """Draw mutants from all that the files under test have, each equally likely.

    Those of the least hash are taken, so that a change of one file leaves the others' draws nearly as they were.
    """
    ranked = []
    for pattern in MODULES:
        for path in sorted(ROOT.glob(pattern)):
            file, source = str(path.relative_to(ROOT)), path.read_bytes()
            if any(fnmatch(file, left_out) for left_out in LEFT_OUT):
                continue
            lines, alike = source.decode().splitlines(), Counter[str]()
            for mutant in mutants(source):
                name = f"{file} | {lines[mutant.line - 1].strip()} | {mutant.kind} | {mutant.before} | {mutant.after}"
                alike[name] += 1
                digest = hashlib.sha256(f"{seed} | {alike[name]} | {name}".encode()).hexdigest()
                ranked.append((digest, file, mutant))
    # In the order of the draw: the first results of a run that is stopped are a sample, too.
    made = ((f, m) for _, f, m in sorted(ranked) if compiles(m.apply((ROOT / f).read_bytes())))
    return [(file, mutant) for file, mutant in islice(made, count) if file.startswith(only or "")]


def named(only: str | None) -> list[Bug]:
    """The bugs made by hand."""
    bugs = []
    for bug in BUGS:
        text = (ROOT / bug.file).read_text()
        if text.count(bug.before) != 1:
            raise SystemExit(f"{bug.name}: {bug.file} holds its text {text.count(bug.before)} times, expected once")
        line = text[: text.index(bug.before)].count("\n") + 1
        if only is None or bug.file.startswith(only):
            changed = text.replace(bug.before, bug.after).encode()
            bugs.append(Bug(bug.file, f"{line} {bug.name}", line, changed, bug.tests))
    return bugs


def _noticed_before(out: Path) -> dict[str, Verdict]:
    """Return the bugs that earlier results call noticed: tests are not taken away."""
    if not out.exists():
        return {}
    verdicts = [Verdict(**verdict) for verdict in json.loads(out.read_text())["verdicts"]]
    return {verdict.key: verdict for verdict in verdicts if verdict.noticed_by}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["named", "sample"])
    parser.add_argument("--count", type=int, default=240)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", help="beginning of the paths to judge, of all that are drawn")
    parser.add_argument("--again", action="store_true", help="judge what the results so far lack or had unnoticed")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--out", type=Path, help="file for the results; default: in docs/results/mutants")
    options = parser.parse_args()
    _preload()
    if options.what == "named":
        bugs = named(options.only)
    else:
        drawn = sample(options.count, options.seed, options.only)
        bugs = [
            Bug(f, str(m), m.line, m.apply((ROOT / f).read_bytes()), ("-m", "fast", *tests_of(f))) for f, m in drawn
        ]
    out = options.out or RESULTS / ("named.json" if options.what == "named" else f"sample-{options.seed}.json")
    kept = _noticed_before(out) if options.again else {}
    texts = {bug: (ROOT / bug.file).read_text().splitlines()[bug.line - 1].strip() for bug in bugs}
    done = {bug: kept[key] for bug in bugs if (key := _key(bug.file, texts[bug], bug.change)) in kept}
    verdicts = list(done.values())
    for verdict in judge_all([bug for bug in bugs if bug not in done], options.processes):
        verdicts.append(verdict)
        _write(out, verdicts)
    _write(out, verdicts)
    noticed = sum(verdict.noticed_by is not None for verdict in verdicts)
    unexplained = [v for v in verdicts if v.noticed_by is None and v.explanation is None]
    print(f"{noticed} of {len(verdicts)} noticed ({noticed / len(verdicts):.1%}); {len(unexplained)} unexplained")
    for verdict in unexplained:
        print(f"  {verdict.key}")


def _write(out: Path, verdicts: Sequence[Verdict]) -> None:
    """Write the results so far: a run that is stopped goes on with ``--again``."""
    noticed = sum(verdict.noticed_by is not None for verdict in verdicts)
    result = {
        "command": "python benchmarks/mutants.py " + " ".join(sys.argv[1:]),
        "bugs": len(verdicts),
        "noticed": noticed,
        "share": round(noticed / max(len(verdicts), 1), 4),
        "verdicts": [asdict(verdict) for verdict in sorted(verdicts, key=lambda v: (v.file, v.change))],
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
