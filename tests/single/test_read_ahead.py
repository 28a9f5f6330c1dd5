import threading
import time

import pytest

from hvdtrain.checkpoint.read_ahead import read_ahead


def test_later_items_are_read_while_one_is_processed():
    started = {name: threading.Event() for name in "abc"}
    may_end = threading.Event()

    def read(name):
        started[name].set()
        if name == "b":
            assert may_end.wait(60)

    items = read_ahead("abc", read)
    assert next(items) == "a"
    assert started["b"].wait(60), "b must be read while a is processed"
    may_end.set()
    assert list(items) == ["b", "c"]


def test_no_item_comes_before_it_is_read_and_order_is_kept():
    read = []
    for item in read_ahead(range(50), read.append):
        assert item in read
    assert read == list(range(50))


def test_an_error_comes_in_place_of_its_item():
    def read(item):
        if item == 1:
            raise OSError("disk")

    items = read_ahead(range(3), read)
    assert next(items) == 0
    with pytest.raises(OSError, match="disk"):
        next(items)
    assert list(items) == []


def test_closing_leaves_out_later_items():
    read = []

    def read_slowly(item):
        time.sleep(0.02)
        read.append(item)

    items = read_ahead(range(100), read_slowly)
    assert next(items) == 0
    items.close()
    assert len(read) < 50
