"""Errors that count as a user's mistakes, and their messages."""

import errno
import os

import pytest

from client_pipeline import durable
from flower_app.error_text import mistake_text


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENAMETOOLONG, errno.EROFS])
def test_a_path_that_cannot_be_used_is_named_with_its_reason(number):
    error = OSError(number, os.strerror(number), "/srv/x")
    assert mistake_text(error) == f"/srv/x: {os.strerror(number)}; check the path, or give another"


def test_a_disk_that_is_full_or_broken_is_no_mistake():
    for number in (errno.ENOSPC, errno.EIO, errno.EMFILE):
        assert mistake_text(OSError(number, os.strerror(number), "/srv/x")) == ""
    assert mistake_text(PermissionError("not a path's")) == mistake_text(RuntimeError("x")) == ""


def test_a_file_that_cannot_be_written_is_named_and_not_what_lies_aside(tmp_path):
    for path in (tmp_path / "nowhere" / "x.toml", tmp_path):
        with pytest.raises(OSError) as raised:
            durable.write_text(path, "text")
        assert raised.value.filename == str(path) and "aside" not in str(raised.value)
