"""Large libraries are imported without full garbage collections, and are looked at in none afterwards."""

import gc
import sys

import pytest

from client_pipeline.quick_imports import quick_import, quick_imports


@pytest.fixture(autouse=True)
def collector():
    """Other tests find the collector as it was."""
    thresholds = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.enable()
    gc.set_threshold(*thresholds)


@pytest.fixture
def a_library(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    text = "import gc\nthresholds = gc.get_threshold()\nparts = [[i] for i in range(1000)]\n"
    (tmp_path / "a_library.py").write_text(text)
    yield tmp_path
    sys.modules.pop("a_library", None)


def test_a_module_is_imported_without_full_collections_and_is_not_looked_at_later(a_library):
    gc.unfreeze()
    before = gc.get_threshold()
    module = quick_import("a_library")
    assert min(module.thresholds[1:]) >= 1000 > max(before[1:]) and gc.get_threshold() == before
    assert gc.get_freeze_count() > 1000


def test_what_is_there_already_is_not_frozen_with_the_objects_of_a_later_time(a_library):
    quick_import("a_library")
    gc.unfreeze()
    assert quick_import("a_library").parts and not gc.get_freeze_count()


def test_a_module_that_fails_leaves_the_collector_as_it_was(a_library):
    before = gc.get_threshold()
    (a_library / "a_library.py").write_text("raise OSError('no such library')\n")
    with pytest.raises(OSError, match="no such library"):
        quick_import("a_library")
    assert gc.get_threshold() == before


def test_a_collector_that_somebody_has_turned_off_stays_off():
    gc.disable()
    with quick_imports():
        assert max(gc.get_threshold()[1:]) < 1000
    assert not gc.isenabled()
