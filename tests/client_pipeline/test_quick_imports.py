"""Large libraries are imported while the garbage collector is off, and are no garbage to it afterwards."""

import gc
import sys

import pytest

from client_pipeline.quick_imports import quick_import, quick_imports


@pytest.fixture(autouse=True)
def collector():
    """Other tests find the collector as it was."""
    yield
    gc.unfreeze()
    gc.enable()


@pytest.fixture
def a_library(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    text = "import gc\nwas_enabled = gc.isenabled()\nparts = [[i] for i in range(1000)]\n"
    (tmp_path / "a_library.py").write_text(text)
    yield tmp_path
    sys.modules.pop("a_library", None)


def test_a_module_is_imported_with_the_collector_off_and_is_not_collected_later(a_library):
    gc.unfreeze()
    module = quick_import("a_library")
    assert not module.was_enabled and gc.isenabled()
    assert gc.get_freeze_count() > 1000


def test_what_is_there_already_is_not_frozen_with_the_objects_of_a_later_time(a_library):
    quick_import("a_library")
    gc.unfreeze()
    assert quick_import("a_library").parts and not gc.get_freeze_count()


def test_a_module_that_fails_leaves_the_collector_on(a_library):
    (a_library / "a_library.py").write_text("raise OSError('no such library')\n")
    with pytest.raises(OSError, match="no such library"):
        quick_import("a_library")
    assert gc.isenabled()


def test_a_collector_that_somebody_has_turned_off_stays_off():
    gc.disable()
    with quick_imports():
        pass
    assert not gc.isenabled()
