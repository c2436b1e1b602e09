"""What a process says of its own memory, and what it asks the C library for."""

import ctypes
import resource
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from client_pipeline.runtime import memory
from client_pipeline.runtime.memory import (
    forget_peak,
    give_freed_memory_back,
    keep_freed_memory,
    peak_bytes,
    resident_bytes,
)


@pytest.fixture
def library(monkeypatch):
    """A C library that notes what it is asked for."""
    seen = SimpleNamespace(calls=[], takes={}, has=("mallopt", "malloc_trim"))

    def function(name):
        return lambda *arguments: seen.calls.append((name, *arguments)) or seen.takes.get(arguments[0], 1)

    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace(**{name: function(name) for name in seen.has}))
    return seen


def test_both_settings_are_made_with_one_limit(library):
    # M_MMAP_THRESHOLD is -3 and M_TRIM_THRESHOLD -1 in malloc.h.
    assert keep_freed_memory(1 << 20)
    assert sorted(library.calls) == [("mallopt", -3, 1 << 20), ("mallopt", -1, 1 << 20)]
    library.calls.clear()
    assert keep_freed_memory()
    assert {limit for *_, limit in library.calls} == {1 << 30}


@pytest.mark.parametrize("refused", [-1, -3])
def test_a_library_that_refuses_one_of_them_has_not_taken_the_setting(library, refused):
    library.takes[refused] = 0
    assert not keep_freed_memory()


def test_other_libraries_and_systems_are_not_asked(library, monkeypatch):
    library.has = ()
    assert not keep_freed_memory()
    give_freed_memory_back()
    library.has = ("mallopt", "malloc_trim")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not keep_freed_memory()
    give_freed_memory_back()
    assert library.calls == []


def test_what_is_free_is_given_back_once(library):
    give_freed_memory_back()
    assert library.calls == [("malloc_trim", 0)]


def test_memory_of_this_process_is_the_systems_figure():
    process = psutil.Process().memory_info().rss
    assert 0.5 * process < resident_bytes() < 2 * process
    assert peak_bytes() >= 0.9 * resident_bytes()


@pytest.fixture
def system(monkeypatch, tmp_path):
    """Files of ``/proc`` that a test writes."""
    monkeypatch.setattr(memory, "Path", lambda path: tmp_path / Path(path).name)
    return tmp_path


def test_the_peak_is_the_high_water_mark_where_the_system_knows_it(system):
    (system / "status").write_text("Name:\tx\nVmPeak:\t  900 kB\nVmHWM:\t  700 kB\nVmRSS:\t 600 kB\n")
    assert peak_bytes() == 700 * 1024
    forget_peak()
    assert (system / "clear_refs").read_text() == "5"


@pytest.mark.parametrize(("platform", "unit"), [("linux", 1024), ("darwin", 1)])
def test_elsewhere_the_peak_is_the_largest_since_the_process_began(system, monkeypatch, platform, unit):
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=500))
    assert peak_bytes() == 500 * unit
    (system / "status").write_text("Name:\tx\n")
    assert peak_bytes() == 500 * unit


def test_a_peak_that_cannot_be_forgotten_is_no_error(system):
    (system / "clear_refs").mkdir()
    forget_peak()
