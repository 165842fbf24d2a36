"""State is taken out and put back. test_every_option.py has runs that go on; here is what does not fit, and files."""

from __future__ import annotations

import errno
import gc
import os
import pickle
import sys
import warnings
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from raw_arrays import CASES, Make, bfloat16, bits, every_case, gradients, model, refused, train

from thalweg.errors import OptionError, StateError
from thalweg.numpy import LAMB, LARS, Adafactor, Optimizer


def by_file(source: Optimizer, target: Optimizer, folder: Path) -> None:
    source.save(folder / "state.npz")
    target.load(folder / "state.npz")


def stepped(make: Make, steps: int = 3) -> Optimizer:
    optimizer = make()
    train(optimizer, model(), gradients(steps))
    return optimizer


class TestStateDict:
    def test_what_is_in_it(self) -> None:
        optimizer = stepped(partial(CASES["LAMB"], global_step=True))
        saved = optimizer.state_dict()
        assert bits(saved.pop("state")) == bits(optimizer.state)
        assert saved == {"layout": 1, "optimizer": "LAMB", "version": 1, "lr": 0.05, "iteration": 3}

    def test_it_is_a_copy_on_the_way_out_and_in(self) -> None:
        """And what is loaded replaces all that was there."""
        optimizer, other = stepped(CASES["Kron"], 2), stepped(CASES["Kron"], 5)
        other.update("later", np.ones(3), np.ones(3))
        saved, before = optimizer.state_dict(), bits(optimizer.state)
        other.load_state_dict(saved)
        for entries in saved["state"].values():
            for entry in entries.values():
                if isinstance(entry, np.ndarray):
                    entry.fill(7)
        saved["state"]["new"] = {"step": np.array(1)}
        assert bits(optimizer.state) == bits(other.state) == before
        saved = optimizer.state_dict()
        train(optimizer, model(), gradients(3))
        assert bits(saved["state"]) == before != bits(optimizer.state)

    def test_a_learning_rate_that_was_a_number_is_restored_and_a_function_stays(self, tmp_path: Path) -> None:
        own, number = LARS(lambda t: 0.1 / t), LARS(0.125)
        by_file(LARS(0.25), own, tmp_path)
        assert callable(own.lr)
        by_file(own, number, tmp_path)
        assert number.lr == 0.125
        by_file(LARS(0.25), number, tmp_path)
        assert number.lr == 0.25

    def test_names_survive(self, tmp_path: Path) -> None:
        names = [1, "1", 0, -3, 2**70, "", "a/b\\c.d", "about", "step", "größe", "名前", "with 'quotes' \"\n", "0.step"]
        source, target = LAMB(0.1), LAMB(0.1)
        for index, name in enumerate(names):
            source.update(name, np.ones(index), np.ones(index))
        by_file(source, target, tmp_path)
        assert [(type(name), name) for name in target.state] == [(type(name), name) for name in names]
        assert bits(list(target.state.values())) == bits(list(source.state.values()))


#: What is numpy's own; tests/test_exchange.py has what all front ends refuse.
BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "other shapes": (
        dict(state={"conv": {"step": 1, "exp_avg": np.ones(3), "exp_avg_sq": np.ones(3)}}),
        "state of 'conv' does not fit",
    ),
    "uneven lists": (dict(state={"w": {"step": 1, "exp_avg": [[1.0], []]}}), "this state is damaged: ValueError"),
    "negative iteration": (dict(iteration=-4), "iteration .*must be a whole number >= 0, got -4"),
    "a name that is none": (dict(state={("a",): {"step": 1}}), "this state is damaged: .*name"),
    "negative lr": (dict(lr=-1.0), "this state is damaged: lr must be"),
}


class TestRefused:
    @pytest.mark.parametrize("kind", BROKEN)
    def test_what_does_not_fit_changes_nothing(self, kind: str) -> None:
        changes, said = BROKEN[kind]
        optimizer = stepped(CASES["LAMB"])
        with refused(StateError, said, optimizer):
            optimizer.load_state_dict({**optimizer.state_dict(), "lr": 0.5, "iteration": 9, **changes})

    @every_case
    def test_another_shape_shows_at_the_next_step(self, make: Make) -> None:
        optimizer, saved = make(), make()
        saved.update("w", np.ones((4, 3), "float32"), np.ones((4, 3), "float32"))
        optimizer.load_state_dict(saved.state_dict())
        weights, good = np.ones((5, 7), "float32"), np.ones((2, 2), "float32")
        for params in ({"good": good, "w": weights}, {"w": weights, "good": good}):
            with refused(StateError, "state of 'w' does not fit.*clear_state", optimizer, params):
                optimizer.step(params, {name: np.ones_like(p) for name, p in params.items()})
        optimizer.update("w", np.ones((4, 3), "float32"), np.ones((4, 3), "float32"))
        assert optimizer.state["w"]["step"] == 2

    def test_other_options_show_at_the_next_step(self) -> None:
        optimizer, saved = Adafactor(factored=False), Adafactor(min_dim_size_to_factor=2)
        weights = np.ones((4, 3))
        saved.update("w", weights.copy(), np.ones((4, 3)))
        optimizer.load_state_dict(saved.state_dict())
        with refused(StateError, "'w'.*variance.*row_var.*restore the options", optimizer, weights):
            optimizer.update("w", weights, np.ones((4, 3)))


class TestFiles:
    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    def test_numpy_reads_them_without_pickle(self, dtype: str, tmp_path: Path) -> None:
        bfloat16()
        optimizer = stepped(partial(CASES["Kron"], state_dtype=dtype))
        optimizer.save(tmp_path / "state.npz")
        with np.load(tmp_path / "state.npz", allow_pickle=False) as file:
            arrays = {key: file[key] for key in file.files}
        assert all(x.dtype.kind in "fiuU" for x in arrays.values())
        held = {x.tobytes() for x in arrays.values()}
        assert all(entry.tobytes() in held for entries in optimizer.state.values() for entry in entries.values())

    def test_paths_may_be_text_and_must_be_files(self, tmp_path: Path) -> None:
        path, optimizer, loaded = str(tmp_path / "state.npz"), stepped(CASES["LARS"]), CASES["LARS"]()
        with refused(StateError, "there is no file .*state", loaded):
            loaded.load(path)
        optimizer.save(path)
        loaded.load(path)
        assert bits(loaded.state) == bits(optimizer.state)
        assert os.listdir(tmp_path) == [Path(path).name]
        (tmp_path / "folder.npz").mkdir()
        with refused(StateError, "is not a file", optimizer):
            optimizer.load(tmp_path / "folder.npz")

    @pytest.mark.parametrize("name", ["state", "state.txt", "state.npy", "state.npz.gz", "state.safetensors", ".npz"])
    def test_other_endings_are_refused_and_nothing_is_written(self, name: str, tmp_path: Path) -> None:
        optimizer = stepped(CASES["LARS"])
        with refused(StateError, "kept in .npz files: .*, got", optimizer):
            optimizer.save(tmp_path / name)
        assert os.listdir(tmp_path) == []

    @pytest.mark.parametrize("fails", ["fsync", "replace"])
    def test_a_failed_write_leaves_the_old_file(
        self, fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path, optimizer = tmp_path / "state.npz", stepped(CASES["LAMB"])
        optimizer.save(path)
        before = path.read_bytes()
        optimizer.update("conv", model()["conv"], gradients(1)[0]["conv"])

        def full(*args: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, fails, full)
            with pytest.raises(OSError, match="No space left"):
                optimizer.save(path)
        assert path.read_bytes() == before
        assert os.listdir(tmp_path) == [path.name]
        optimizer.save(path)
        assert path.read_bytes() != before

    def test_what_is_no_such_file(self, tmp_path: Path) -> None:
        """A beginning of one, one with a flipped bit, other files, arrays of others. All are closed."""
        path, optimizer = tmp_path / "state.npz", stepped(CASES["Kron"])
        optimizer.save(path)
        whole, others = path.read_bytes(), tmp_path / "others.npz"
        at = whole.index(optimizer.state["conv"]["momentum_buffer"].tobytes())
        flipped = whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]
        np.savez(others, weights=np.ones(3))
        np.save(tmp_path / "one.npy", np.ones(3))
        beginnings = [whole[: int(share * len(whole))] for share in (0.0, 0.02, 0.5, 0.9, 0.999)]
        strange = [b"hello", b"\x93NUMPY", b"PK\x03\x04", b"\x80\x04N.", bytes(100)]
        contents = (flipped, *beginnings, *strange, others.read_bytes(), (tmp_path / "one.npy").read_bytes())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", ResourceWarning)
            for content in contents:
                path.write_bytes(content)
                with refused(StateError, "state.* is damaged, or not a state saved", optimizer):
                    optimizer.load(path)
            gc.collect()
        assert [str(warning.message) for warning in caught] == []

    def test_a_pickle_is_never_opened(self, tmp_path: Path) -> None:
        class Bomb:
            def __reduce__(self) -> Any:
                return (Path.touch, (tmp_path / "opened",))

        path, optimizer = tmp_path / "state.npz", stepped(CASES["LARS"])
        optimizer.save(path)
        with np.load(path) as file:
            arrays = dict(file)
        arrays["0.momentum_buffer"] = np.array([Bomb()], dtype=object)
        np.savez(path, **arrays)
        with refused(StateError, "is damaged", optimizer):
            optimizer.load(path)
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("about.npy", pickle.dumps(Bomb()))
        with refused(StateError, "is damaged", optimizer):
            optimizer.load(path)
        assert not (tmp_path / "opened").exists()

    def test_without_ml_dtypes_it_says_what_to_install(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        bfloat16()
        stepped(partial(CASES["LARS"], momentum_dtype="bfloat16")).save(tmp_path / "state.npz")
        optimizer = LARS(0.1)
        monkeypatch.setitem(sys.modules, "ml_dtypes", None)
        with refused(StateError, "bfloat16.*pip install ml_dtypes", optimizer):
            optimizer.load(tmp_path / "state.npz")
        for options in (dict(momentum_dtype="bfloat16"), dict(overrides=[("*", dict(momentum_dtype="bfloat16"))])):
            with pytest.raises(OptionError, match=r"momentum_dtype='bfloat16'.*pip install ml_dtypes"):
                LARS(0.1, **options)


def test_a_state_of_fortran_order_is_saved_by_its_numbers(tmp_path: Path) -> None:
    optimizer, loaded = stepped(CASES["LAMB"]), CASES["LAMB"]()
    turned = {
        name: {key: np.asfortranarray(entry) if entry.ndim else entry for key, entry in entries.items()}
        for name, entries in optimizer.state_dict()["state"].items()
    }
    optimizer.load_state_dict({**optimizer.state_dict(), "state": turned})
    by_file(optimizer, loaded, tmp_path)
    assert bits(loaded.state) == bits(optimizer.state)
