"""What is pickled, and what has to be right before anything is unpickled."""

import dataclasses
import sys
import threading
import types

import pytest
from helpers.unplain import Bomb, Point, Refusing, ran

from tfdist.collectives import objects
from tfdist.core import pickling, runtime, world
from tfdist.core.rendezvous.links import LinkCredentials

KEY = b"k" * 32
LIMIT = 1 << 20


@pytest.fixture(autouse=True)
def nothing_ran():
    ran.clear()


def sealed(obj, about="rank 0: call", key=KEY):
    return pickling.seal(obj, about, key, max_bytes=LIMIT)


@pytest.mark.parametrize(
    "obj", [Point([1, {2}]), {1: Point("a"), (2, 3): 1 << 200}, len, Point, range(3)]
)
def test_an_object_comes_back(obj):
    assert pickling.unseal(sealed(obj), "rank 0: call", KEY) == obj


@pytest.mark.parametrize(
    ("about", "key"),
    [
        ("rank 1: call", KEY),
        ("rank 0: another call", KEY),
        ("rank 0: call", b"K" * 32),
        ("", KEY),
    ],
)
def test_nothing_runs_that_was_made_for_something_else(about, key):
    with pytest.raises(pickling.NotLoadedError, match="Nothing was unpickled"):
        pickling.unseal(sealed(Bomb()), about, key)
    assert ran == []


def test_nothing_runs_of_bytes_that_were_changed_or_cut():
    good = sealed(Bomb())
    wrong = [
        good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :]
        for place in range(len(good))
    ]
    for data in [*wrong, *(good[:end] for end in range(len(good))), good + b"\0"]:
        with pytest.raises(pickling.NotLoadedError, match="Nothing was unpickled"):
            pickling.unseal(data, "rank 0: call", KEY)
    assert ran == []
    pickling.unseal(good, "rank 0: call", KEY)
    assert ran == ["boom"]


def test_what_raises_while_it_is_unpickled_says_so():
    with pytest.raises(pickling.NotLoadedError, match=r"ValueError: .*'no number'"):
        pickling.unseal(sealed(Refusing()), "rank 0: call", KEY)


def test_too_many_bytes_are_refused():
    size = len(sealed(Point("x" * 100)))
    pickling.seal(Point("x" * 100), "", KEY, max_bytes=size)
    words = f"at most {size - 1} bytes, got {size} bytes, pickled. Raise max_bytes"
    with pytest.raises(ValueError, match=words):
        pickling.seal(Point("x" * 100), "", KEY, max_bytes=size - 1)


def without_cloudpickle(monkeypatch):
    found = pickling.importlib.util.find_spec
    monkeypatch.setattr(
        pickling.importlib.util,
        "find_spec",
        lambda name: None if name == "cloudpickle" else found(name),
    )


def test_what_cannot_be_pickled_is_named(monkeypatch):
    without_cloudpickle(monkeypatch)
    with pytest.raises(TypeError, match="got builtins.generator: cannot pickle"):
        sealed(x for x in [1])
    with pytest.raises(TypeError, match="pip install cloudpickle"):
        sealed(lambda: 1)
    with pytest.raises(TypeError, match="pip install cloudpickle"):
        sealed(type("Inner", (), {"__qualname__": "f.<locals>.Inner"}))
    with pytest.raises(TypeError, match="_thread._local") as caught:
        sealed(threading.local())
    assert "cloudpickle" not in str(caught.value)


def test_cloudpickle_is_used_where_it_is_installed(monkeypatch):
    module = types.ModuleType("cloudpickle")
    calls = []

    def dumps(obj, protocol):
        calls.append((obj, protocol))
        return pickling.pickle.dumps("by cloudpickle", protocol)

    module.dumps = dumps
    module.__spec__ = types.SimpleNamespace(name="cloudpickle")
    monkeypatch.setitem(sys.modules, "cloudpickle", module)
    obj = Point(1)
    assert pickling.unseal(sealed(obj), "rank 0: call", KEY) == "by cloudpickle"
    assert calls == [(obj, 5)]


def test_a_cloudpickle_that_is_broken_is_named(monkeypatch, tmp_path):
    broken = "from cloudpickle import what_is_gone\n"
    (tmp_path / "cloudpickle.py").write_text(broken)
    monkeypatch.delitem(sys.modules, "cloudpickle", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    words = "cannot be imported: ImportError: .*what_is_gone.*Repair or remove it"
    with pytest.raises(TypeError, match=words):
        sealed(Point(1))


def credentials(**changes):
    fields = {"secret": b"s" * 32, "job": "j 1", "generation": 3, "rank": 0}
    return LinkCredentials(**{**fields, "frames": "control", "size": 2, **changes})


def key_of(monkeypatch, of):
    monkeypatch.setattr(runtime, "credentials", lambda: (of, ""))
    return pickling.key()


def test_a_world_has_one_key_and_no_other_world_has_it(monkeypatch):
    own = key_of(monkeypatch, credentials())
    assert own == key_of(monkeypatch, credentials(rank=1))
    others = [
        credentials(secret=b"S" * 32),
        credentials(job="j 2"),
        credentials(generation=4),
    ]
    keys = {own, *(key_of(monkeypatch, other) for other in others)}
    assert len(keys) == 4
    assert all(len(key) == 32 for key in keys)
    assert own not in credentials().secret


@pytest.fixture
def no_world():
    world.shutdown()
    yield
    world.shutdown()


@pytest.mark.parametrize("value", ["plain", "pickle"])
@pytest.mark.usefixtures("no_world")
def test_the_choice_is_that_of_init(monkeypatch, value):
    monkeypatch.setenv("TFDIST_OBJECTS", value)
    world.init()
    for later in ("plain", "pickle"):
        monkeypatch.setenv("TFDIST_OBJECTS", later)
        assert pickling.is_enabled() == (value == "pickle")


@pytest.mark.usefixtures("no_world")
def test_ranks_without_a_common_secret_do_not_unpickle(monkeypatch):
    monkeypatch.setattr(runtime, "credentials", lambda: (None, ""))
    monkeypatch.setattr(runtime, "size", lambda: 2)
    assert not pickling.is_enabled()
    monkeypatch.setattr(runtime, "setting", lambda _: "pickle")
    with pytest.raises(RuntimeError, match="no common secret"):
        pickling.is_enabled()
    monkeypatch.setattr(runtime, "size", lambda: 1)
    assert pickling.is_enabled()


def test_a_newcomer_that_rehearses_needs_no_common_secret(monkeypatch, init_with):
    init_with(TFDIST_OBJECTS="pickle")
    topology = dataclasses.replace(runtime.check_initialized(), rank=1, size=2)
    monkeypatch.setattr(runtime.state, "topology", topology)
    with pytest.raises(RuntimeError, match="have no common secret"):
        pickling.is_enabled()
    monkeypatch.setattr(runtime.state, "rehearses", True)
    assert pickling.is_enabled()
    assert objects.broadcast_object({1, 2}) == {1, 2}
